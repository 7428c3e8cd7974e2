-- Tables as commit c981ef6 made them, before the first release.

PRAGMA journal_mode=WAL;

CREATE TABLE IF NOT EXISTS "delayed_messages" (
	"Id" VARCHAR(250) NOT NULL,
	"Destination" VARCHAR(200) NOT NULL,
	"State" BLOB NOT NULL,
	"Time" DATETIME NOT NULL,
	"Headers" BLOB NOT NULL,
	"RetryCount" INTEGER DEFAULT 0 NOT NULL,
	"DeliverConnId" VARCHAR(250),
	"Tag" VARCHAR(250),
	"ExpiresAt" DATETIME,
	"Digest" BLOB,
	"StoredAt" DATETIME,
	"NextTry" DATETIME,
	"LastError" VARCHAR(1000),
	"Run" INTEGER,
	"ReplacedAt" DATETIME,
	PRIMARY KEY ("Id")
);

CREATE INDEX IF NOT EXISTS "delayed_messages_Destination" ON "delayed_messages" ("Destination", "Time");

CREATE INDEX IF NOT EXISTS "delayed_messages_NextTry" ON "delayed_messages" ("NextTry") WHERE "NextTry" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_Run" ON "delayed_messages" ("Run", "Time") WHERE "Run" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_Tag" ON "delayed_messages" ("Tag", "Time") WHERE "Tag" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_Time" ON "delayed_messages" ("Time");

CREATE TABLE IF NOT EXISTS "delayed_messages_past" (
	"Id" VARCHAR(250) NOT NULL,
	"Destination" VARCHAR(200),
	"Time" DATETIME,
	"Digest" BLOB,
	"Outcome" VARCHAR(20) NOT NULL,
	"At" DATETIME NOT NULL,
	"Dispatcher" VARCHAR(64),
	"ClaimedUntil" DATETIME,
	"Tag" VARCHAR(250),
	"Run" INTEGER,
	"DeliverConnId" VARCHAR(250),
	PRIMARY KEY ("Id")
);

CREATE INDEX IF NOT EXISTS "delayed_messages_past_At" ON "delayed_messages_past" ("At");

CREATE INDEX IF NOT EXISTS "delayed_messages_past_Run" ON "delayed_messages_past" ("Run", "At") WHERE "Run" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_past_Tag" ON "delayed_messages_past" ("Tag", "At") WHERE "Tag" IS NOT NULL;

CREATE TABLE IF NOT EXISTS "delayed_messages_failed" (
	"Id" VARCHAR(250) NOT NULL,
	"Destination" VARCHAR(200) NOT NULL,
	"State" BLOB NOT NULL,
	"Time" DATETIME NOT NULL,
	"Headers" BLOB NOT NULL,
	"RetryCount" INTEGER DEFAULT 0 NOT NULL,
	"DeliverConnId" VARCHAR(250),
	"Tag" VARCHAR(250),
	"ExpiresAt" DATETIME,
	"Digest" BLOB,
	"StoredAt" DATETIME,
	"NextTry" DATETIME,
	"LastError" VARCHAR(1000),
	"Run" INTEGER,
	"ReplacedAt" DATETIME,
	"Reason" VARCHAR(20) NOT NULL,
	"FailedAt" DATETIME NOT NULL,
	PRIMARY KEY ("Id")
);

CREATE INDEX IF NOT EXISTS "delayed_messages_failed_Destination" ON "delayed_messages_failed" ("Destination", "Time");

CREATE INDEX IF NOT EXISTS "delayed_messages_failed_Run" ON "delayed_messages_failed" ("Run", "Time") WHERE "Run" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_failed_Tag" ON "delayed_messages_failed" ("Tag", "Time") WHERE "Tag" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_failed_Time" ON "delayed_messages_failed" ("Time");

CREATE TABLE IF NOT EXISTS "delayed_messages_audit" (
	"Seq" INTEGER NOT NULL,
	"At" DATETIME NOT NULL,
	"Who" VARCHAR(250),
	"Action" VARCHAR(20) NOT NULL,
	"Selection" TEXT NOT NULL,
	"Counts" TEXT NOT NULL,
	PRIMARY KEY ("Seq")
);

CREATE INDEX IF NOT EXISTS "delayed_messages_audit_At" ON "delayed_messages_audit" ("At");

CREATE TABLE IF NOT EXISTS "delayed_messages_dispatchers" (
	"Id" VARCHAR(64) NOT NULL,
	"ConnIds" TEXT NOT NULL,
	"StartedAt" DATETIME NOT NULL,
	"SeenAt" DATETIME NOT NULL,
	"EndedAt" DATETIME,
	"WorkedAt" DATETIME,
	"Problem" VARCHAR(1000),
	"Host" VARCHAR(250),
	"DagId" VARCHAR(250),
	"Lookahead" FLOAT,
	PRIMARY KEY ("Id")
);

CREATE TABLE IF NOT EXISTS "delayed_messages_runs" (
	"Seq" INTEGER NOT NULL,
	"DagId" VARCHAR(250) NOT NULL,
	"RunId" VARCHAR(250) NOT NULL,
	"TaskId" VARCHAR(250) NOT NULL,
	"MapIndex" INTEGER NOT NULL,
	"Iteration" INTEGER,
	"Turn" VARCHAR(100),
	"Anchor" DATETIME,
	"Digest" BLOB NOT NULL,
	"At" DATETIME NOT NULL,
	PRIMARY KEY ("Seq")
);

CREATE INDEX IF NOT EXISTS "delayed_messages_runs_At" ON "delayed_messages_runs" ("At");

CREATE INDEX IF NOT EXISTS "delayed_messages_runs_DagId" ON "delayed_messages_runs" ("DagId");

CREATE UNIQUE INDEX IF NOT EXISTS "delayed_messages_runs_Digest" ON "delayed_messages_runs" ("Digest");

CREATE TABLE IF NOT EXISTS "delayed_messages_rates" (
	"Destination" VARCHAR(200) NOT NULL,
	"Rate" FLOAT NOT NULL,
	"EmptyAt" DATETIME NOT NULL,
	PRIMARY KEY ("Destination")
);

CREATE TABLE IF NOT EXISTS "delayed_messages_history" (
	"At" DATETIME NOT NULL,
	"Seconds" INTEGER NOT NULL,
	"Dispatcher" VARCHAR(64) NOT NULL,
	"ConnId" VARCHAR(250) NOT NULL,
	"Destination" VARCHAR(200) NOT NULL,
	"Dispatched" INTEGER DEFAULT 0 NOT NULL,
	"Failed" INTEGER DEFAULT 0 NOT NULL,
	"Expired" INTEGER DEFAULT 0 NOT NULL,
	"Retried" INTEGER DEFAULT 0 NOT NULL,
	"Late0" INTEGER DEFAULT 0 NOT NULL,
	"Late1" INTEGER DEFAULT 0 NOT NULL,
	"Late2" INTEGER DEFAULT 0 NOT NULL,
	"Late3" INTEGER DEFAULT 0 NOT NULL,
	"Late4" INTEGER DEFAULT 0 NOT NULL,
	"Late5" INTEGER DEFAULT 0 NOT NULL,
	"Late6" INTEGER DEFAULT 0 NOT NULL,
	"Late7" INTEGER DEFAULT 0 NOT NULL,
	"Late8" INTEGER DEFAULT 0 NOT NULL,
	"MaxLate" FLOAT DEFAULT 0 NOT NULL,
	PRIMARY KEY ("At", "Seconds", "Dispatcher", "ConnId", "Destination")
);

CREATE TABLE IF NOT EXISTS "delayed_messages_cancelled" (
	"Id" VARCHAR(250) NOT NULL,
	"Destination" VARCHAR(200) NOT NULL,
	"State" BLOB NOT NULL,
	"Time" DATETIME NOT NULL,
	"Headers" BLOB NOT NULL,
	"RetryCount" INTEGER DEFAULT 0 NOT NULL,
	"DeliverConnId" VARCHAR(250),
	"Tag" VARCHAR(250),
	"ExpiresAt" DATETIME,
	"Digest" BLOB,
	"StoredAt" DATETIME,
	"NextTry" DATETIME,
	"LastError" VARCHAR(1000),
	"Run" INTEGER,
	"ReplacedAt" DATETIME,
	"Reason" VARCHAR(20),
	"FailedAt" DATETIME,
	"Until" DATETIME NOT NULL,
	PRIMARY KEY ("Id")
);

CREATE INDEX IF NOT EXISTS "delayed_messages_cancelled_Run" ON "delayed_messages_cancelled" ("Run", "Time") WHERE "Run" IS NOT NULL;

CREATE INDEX IF NOT EXISTS "delayed_messages_cancelled_Time" ON "delayed_messages_cancelled" ("Time");

CREATE INDEX IF NOT EXISTS "delayed_messages_cancelled_Until" ON "delayed_messages_cancelled" ("Until");

CREATE TABLE IF NOT EXISTS "delayed_messages_jobs" (
	"Seq" INTEGER NOT NULL,
	"Total" INTEGER NOT NULL,
	"State" VARCHAR(20) NOT NULL,
	"SeenAt" DATETIME NOT NULL,
	"EndedAt" DATETIME,
	"StoppedBy" VARCHAR(250),
	"Problem" VARCHAR(1000),
	PRIMARY KEY ("Seq")
);

CREATE TABLE IF NOT EXISTS "delayed_messages_version" (
	"Version" INTEGER NOT NULL,
	"At" DATETIME NOT NULL,
	PRIMARY KEY ("Version")
);

INSERT INTO "delayed_messages_version" ("Version", "At") SELECT 5 AS "Version", (SELECT strftime('%Y-%m-%d %H:%M:%f000', 'now'))
WHERE NOT (EXISTS (SELECT *
FROM "delayed_messages_version"));
