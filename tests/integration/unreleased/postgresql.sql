-- Tables as commit c981ef6 made them, before the first release.

CREATE TABLE IF NOT EXISTS "the_schema"."delayed_messages" (
	"Id" VARCHAR(250) COLLATE "C" NOT NULL,
	"Destination" VARCHAR(200) COLLATE "C" NOT NULL,
	"State" BYTEA NOT NULL,
	"Time" TIMESTAMP WITH TIME ZONE NOT NULL,
	"Headers" BYTEA NOT NULL,
	"RetryCount" INTEGER DEFAULT 0 NOT NULL,
	"DeliverConnId" VARCHAR(250) COLLATE "C",
	"Tag" VARCHAR(250) COLLATE "C",
	"ExpiresAt" TIMESTAMP WITH TIME ZONE,
	"Digest" BYTEA,
	"StoredAt" TIMESTAMP WITH TIME ZONE,
	"NextTry" TIMESTAMP WITH TIME ZONE,
	"LastError" VARCHAR(1000) COLLATE "C",
	"Run" BIGINT,
	"ReplacedAt" TIMESTAMP WITH TIME ZONE,
	PRIMARY KEY ("Id")
);

CREATE INDEX IF NOT EXISTS "delayed_messages_Destination" ON "the_schema"."delayed_messages" ("Destination", "Time");

CREATE INDEX IF NOT EXISTS "delayed_messages_NextTry" ON "the_schema"."delayed_messages" ("NextTry") WHERE "NextTry" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_Run" ON "the_schema"."delayed_messages" ("Run", "Time") WHERE "Run" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_Tag" ON "the_schema"."delayed_messages" ("Tag", "Time") WHERE "Tag" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_Time" ON "the_schema"."delayed_messages" ("Time");

CREATE TABLE IF NOT EXISTS "the_schema"."delayed_messages_past" (
	"Id" VARCHAR(250) COLLATE "C" NOT NULL,
	"Destination" VARCHAR(200) COLLATE "C",
	"Time" TIMESTAMP WITH TIME ZONE,
	"Digest" BYTEA,
	"Outcome" VARCHAR(20) COLLATE "C" NOT NULL,
	"At" TIMESTAMP WITH TIME ZONE NOT NULL,
	"Dispatcher" VARCHAR(64) COLLATE "C",
	"ClaimedUntil" TIMESTAMP WITH TIME ZONE,
	"Tag" VARCHAR(250) COLLATE "C",
	"Run" BIGINT,
	"DeliverConnId" VARCHAR(250) COLLATE "C",
	PRIMARY KEY ("Id")
);

CREATE INDEX IF NOT EXISTS "delayed_messages_past_At" ON "the_schema"."delayed_messages_past" ("At");

CREATE INDEX IF NOT EXISTS "delayed_messages_past_Run" ON "the_schema"."delayed_messages_past" ("Run", "At") WHERE "Run" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_past_Tag" ON "the_schema"."delayed_messages_past" ("Tag", "At") WHERE "Tag" IS NOT NULL;

CREATE TABLE IF NOT EXISTS "the_schema"."delayed_messages_failed" (
	"Id" VARCHAR(250) COLLATE "C" NOT NULL,
	"Destination" VARCHAR(200) COLLATE "C" NOT NULL,
	"State" BYTEA NOT NULL,
	"Time" TIMESTAMP WITH TIME ZONE NOT NULL,
	"Headers" BYTEA NOT NULL,
	"RetryCount" INTEGER DEFAULT 0 NOT NULL,
	"DeliverConnId" VARCHAR(250) COLLATE "C",
	"Tag" VARCHAR(250) COLLATE "C",
	"ExpiresAt" TIMESTAMP WITH TIME ZONE,
	"Digest" BYTEA,
	"StoredAt" TIMESTAMP WITH TIME ZONE,
	"NextTry" TIMESTAMP WITH TIME ZONE,
	"LastError" VARCHAR(1000) COLLATE "C",
	"Run" BIGINT,
	"ReplacedAt" TIMESTAMP WITH TIME ZONE,
	"Reason" VARCHAR(20) COLLATE "C" NOT NULL,
	"FailedAt" TIMESTAMP WITH TIME ZONE NOT NULL,
	PRIMARY KEY ("Id")
);

CREATE INDEX IF NOT EXISTS "delayed_messages_failed_Destination" ON "the_schema"."delayed_messages_failed" ("Destination", "Time");

CREATE INDEX IF NOT EXISTS "delayed_messages_failed_Run" ON "the_schema"."delayed_messages_failed" ("Run", "Time") WHERE "Run" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_failed_Tag" ON "the_schema"."delayed_messages_failed" ("Tag", "Time") WHERE "Tag" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_failed_Time" ON "the_schema"."delayed_messages_failed" ("Time");

CREATE TABLE IF NOT EXISTS "the_schema"."delayed_messages_audit" (
	"Seq" BIGSERIAL NOT NULL,
	"At" TIMESTAMP WITH TIME ZONE NOT NULL,
	"Who" VARCHAR(250) COLLATE "C",
	"Action" VARCHAR(20) COLLATE "C" NOT NULL,
	"Selection" TEXT NOT NULL,
	"Counts" TEXT NOT NULL,
	PRIMARY KEY ("Seq")
);

CREATE INDEX IF NOT EXISTS "delayed_messages_audit_At" ON "the_schema"."delayed_messages_audit" ("At");

CREATE TABLE IF NOT EXISTS "the_schema"."delayed_messages_dispatchers" (
	"Id" VARCHAR(64) COLLATE "C" NOT NULL,
	"ConnIds" TEXT NOT NULL,
	"StartedAt" TIMESTAMP WITH TIME ZONE NOT NULL,
	"SeenAt" TIMESTAMP WITH TIME ZONE NOT NULL,
	"EndedAt" TIMESTAMP WITH TIME ZONE,
	"WorkedAt" TIMESTAMP WITH TIME ZONE,
	"Problem" VARCHAR(1000) COLLATE "C",
	"Host" VARCHAR(250) COLLATE "C",
	"DagId" VARCHAR(250) COLLATE "C",
	"Lookahead" DOUBLE PRECISION,
	PRIMARY KEY ("Id")
);

CREATE TABLE IF NOT EXISTS "the_schema"."delayed_messages_runs" (
	"Seq" BIGSERIAL NOT NULL,
	"DagId" VARCHAR(250) COLLATE "C" NOT NULL,
	"RunId" VARCHAR(250) COLLATE "C" NOT NULL,
	"TaskId" VARCHAR(250) COLLATE "C" NOT NULL,
	"MapIndex" INTEGER NOT NULL,
	"Iteration" INTEGER,
	"Turn" VARCHAR(100) COLLATE "C",
	"Anchor" TIMESTAMP WITH TIME ZONE,
	"Digest" BYTEA NOT NULL,
	"At" TIMESTAMP WITH TIME ZONE NOT NULL,
	PRIMARY KEY ("Seq")
);

CREATE INDEX IF NOT EXISTS "delayed_messages_runs_At" ON "the_schema"."delayed_messages_runs" ("At");

CREATE INDEX IF NOT EXISTS "delayed_messages_runs_DagId" ON "the_schema"."delayed_messages_runs" ("DagId");

CREATE UNIQUE INDEX IF NOT EXISTS "delayed_messages_runs_Digest" ON "the_schema"."delayed_messages_runs" ("Digest");

CREATE TABLE IF NOT EXISTS "the_schema"."delayed_messages_rates" (
	"Destination" VARCHAR(200) COLLATE "C" NOT NULL,
	"Rate" DOUBLE PRECISION NOT NULL,
	"EmptyAt" TIMESTAMP WITH TIME ZONE NOT NULL,
	PRIMARY KEY ("Destination")
);

CREATE TABLE IF NOT EXISTS "the_schema"."delayed_messages_history" (
	"At" TIMESTAMP WITH TIME ZONE NOT NULL,
	"Seconds" INTEGER NOT NULL,
	"Dispatcher" VARCHAR(64) COLLATE "C" NOT NULL,
	"ConnId" VARCHAR(250) COLLATE "C" NOT NULL,
	"Destination" VARCHAR(200) COLLATE "C" NOT NULL,
	"Dispatched" BIGINT DEFAULT 0 NOT NULL,
	"Failed" BIGINT DEFAULT 0 NOT NULL,
	"Expired" BIGINT DEFAULT 0 NOT NULL,
	"Retried" BIGINT DEFAULT 0 NOT NULL,
	"Late0" BIGINT DEFAULT 0 NOT NULL,
	"Late1" BIGINT DEFAULT 0 NOT NULL,
	"Late2" BIGINT DEFAULT 0 NOT NULL,
	"Late3" BIGINT DEFAULT 0 NOT NULL,
	"Late4" BIGINT DEFAULT 0 NOT NULL,
	"Late5" BIGINT DEFAULT 0 NOT NULL,
	"Late6" BIGINT DEFAULT 0 NOT NULL,
	"Late7" BIGINT DEFAULT 0 NOT NULL,
	"Late8" BIGINT DEFAULT 0 NOT NULL,
	"MaxLate" DOUBLE PRECISION DEFAULT 0 NOT NULL,
	PRIMARY KEY ("At", "Seconds", "Dispatcher", "ConnId", "Destination")
);

CREATE TABLE IF NOT EXISTS "the_schema"."delayed_messages_cancelled" (
	"Id" VARCHAR(250) COLLATE "C" NOT NULL,
	"Destination" VARCHAR(200) COLLATE "C" NOT NULL,
	"State" BYTEA NOT NULL,
	"Time" TIMESTAMP WITH TIME ZONE NOT NULL,
	"Headers" BYTEA NOT NULL,
	"RetryCount" INTEGER DEFAULT 0 NOT NULL,
	"DeliverConnId" VARCHAR(250) COLLATE "C",
	"Tag" VARCHAR(250) COLLATE "C",
	"ExpiresAt" TIMESTAMP WITH TIME ZONE,
	"Digest" BYTEA,
	"StoredAt" TIMESTAMP WITH TIME ZONE,
	"NextTry" TIMESTAMP WITH TIME ZONE,
	"LastError" VARCHAR(1000) COLLATE "C",
	"Run" BIGINT,
	"ReplacedAt" TIMESTAMP WITH TIME ZONE,
	"Reason" VARCHAR(20) COLLATE "C",
	"FailedAt" TIMESTAMP WITH TIME ZONE,
	"Until" TIMESTAMP WITH TIME ZONE NOT NULL,
	PRIMARY KEY ("Id")
);

CREATE INDEX IF NOT EXISTS "delayed_messages_cancelled_Run" ON "the_schema"."delayed_messages_cancelled" ("Run", "Time") WHERE "Run" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_cancelled_Time" ON "the_schema"."delayed_messages_cancelled" ("Time");

CREATE INDEX IF NOT EXISTS "delayed_messages_cancelled_Until" ON "the_schema"."delayed_messages_cancelled" ("Until");

CREATE TABLE IF NOT EXISTS "the_schema"."delayed_messages_jobs" (
	"Seq" BIGINT NOT NULL,
	"Total" BIGINT NOT NULL,
	"State" VARCHAR(20) COLLATE "C" NOT NULL,
	"SeenAt" TIMESTAMP WITH TIME ZONE NOT NULL,
	"EndedAt" TIMESTAMP WITH TIME ZONE,
	"StoppedBy" VARCHAR(250) COLLATE "C",
	"Problem" VARCHAR(1000) COLLATE "C",
	PRIMARY KEY ("Seq")
);

CREATE TABLE IF NOT EXISTS "the_schema"."delayed_messages_version" (
	"Version" INTEGER NOT NULL,
	"At" TIMESTAMP WITH TIME ZONE NOT NULL,
	PRIMARY KEY ("Version")
);

INSERT INTO "the_schema"."delayed_messages_version" ("Version", "At") SELECT 5 AS "Version", (SELECT clock_timestamp())
WHERE NOT (EXISTS (SELECT *
FROM "the_schema"."delayed_messages_version"));
