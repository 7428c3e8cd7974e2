-- Tables as commit c981ef6 made them, before the first release.

CREATE TABLE IF NOT EXISTS `the_schema`.`delayed_messages` (
	`Id` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`Destination` VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`State` LONGBLOB NOT NULL,
	`Time` DATETIME(6) NOT NULL,
	`Headers` LONGBLOB NOT NULL,
	`RetryCount` INTEGER NOT NULL DEFAULT 0,
	`DeliverConnId` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Tag` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`ExpiresAt` DATETIME(6),
	`Digest` VARBINARY(16),
	`StoredAt` DATETIME(6),
	`NextTry` DATETIME(6),
	`LastError` VARCHAR(1000) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Run` BIGINT,
	`ReplacedAt` DATETIME(6),
	PRIMARY KEY (`Id`),
	INDEX `delayed_messages_Destination` (`Destination`, `Time`),
	INDEX `delayed_messages_NextTry` (`NextTry`),
	INDEX `delayed_messages_Run` (`Run`, `Time`),
	INDEX `delayed_messages_Tag` (`Tag`, `Time`),
	INDEX `delayed_messages_Time` (`Time`)
);

CREATE TABLE IF NOT EXISTS `the_schema`.`delayed_messages_past` (
	`Id` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`Destination` VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Time` DATETIME(6),
	`Digest` VARBINARY(16),
	`Outcome` VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`At` DATETIME(6) NOT NULL,
	`Dispatcher` VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`ClaimedUntil` DATETIME(6),
	`Tag` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Run` BIGINT,
	`DeliverConnId` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	PRIMARY KEY (`Id`),
	INDEX `delayed_messages_past_At` (`At`),
	INDEX `delayed_messages_past_Run` (`Run`, `At`),
	INDEX `delayed_messages_past_Tag` (`Tag`, `At`)
);

CREATE TABLE IF NOT EXISTS `the_schema`.`delayed_messages_failed` (
	`Id` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`Destination` VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`State` LONGBLOB NOT NULL,
	`Time` DATETIME(6) NOT NULL,
	`Headers` LONGBLOB NOT NULL,
	`RetryCount` INTEGER NOT NULL DEFAULT 0,
	`DeliverConnId` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Tag` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`ExpiresAt` DATETIME(6),
	`Digest` VARBINARY(16),
	`StoredAt` DATETIME(6),
	`NextTry` DATETIME(6),
	`LastError` VARCHAR(1000) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Run` BIGINT,
	`ReplacedAt` DATETIME(6),
	`Reason` VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`FailedAt` DATETIME(6) NOT NULL,
	PRIMARY KEY (`Id`),
	INDEX `delayed_messages_failed_Destination` (`Destination`, `Time`),
	INDEX `delayed_messages_failed_Run` (`Run`, `Time`),
	INDEX `delayed_messages_failed_Tag` (`Tag`, `Time`),
	INDEX `delayed_messages_failed_Time` (`Time`)
);

CREATE TABLE IF NOT EXISTS `the_schema`.`delayed_messages_audit` (
	`Seq` BIGINT NOT NULL AUTO_INCREMENT,
	`At` DATETIME(6) NOT NULL,
	`Who` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Action` VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`Selection` LONGTEXT NOT NULL,
	`Counts` TEXT NOT NULL,
	PRIMARY KEY (`Seq`),
	INDEX `delayed_messages_audit_At` (`At`)
);

CREATE TABLE IF NOT EXISTS `the_schema`.`delayed_messages_dispatchers` (
	`Id` VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`ConnIds` TEXT NOT NULL,
	`StartedAt` DATETIME(6) NOT NULL,
	`SeenAt` DATETIME(6) NOT NULL,
	`EndedAt` DATETIME(6),
	`WorkedAt` DATETIME(6),
	`Problem` VARCHAR(1000) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Host` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`DagId` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Lookahead` DOUBLE,
	PRIMARY KEY (`Id`)
);

CREATE TABLE IF NOT EXISTS `the_schema`.`delayed_messages_runs` (
	`Seq` BIGINT NOT NULL AUTO_INCREMENT,
	`DagId` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`RunId` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`TaskId` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`MapIndex` INTEGER NOT NULL,
	`Iteration` INTEGER,
	`Turn` VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Anchor` DATETIME(6),
	`Digest` VARBINARY(16) NOT NULL,
	`At` DATETIME(6) NOT NULL,
	PRIMARY KEY (`Seq`),
	INDEX `delayed_messages_runs_At` (`At`),
	INDEX `delayed_messages_runs_DagId` (`DagId`),
	UNIQUE INDEX `delayed_messages_runs_Digest` (`Digest`)
);

CREATE TABLE IF NOT EXISTS `the_schema`.`delayed_messages_rates` (
	`Destination` VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`Rate` DOUBLE NOT NULL,
	`EmptyAt` DATETIME(6) NOT NULL,
	PRIMARY KEY (`Destination`)
);

CREATE TABLE IF NOT EXISTS `the_schema`.`delayed_messages_history` (
	`At` DATETIME(6) NOT NULL,
	`Seconds` INTEGER NOT NULL,
	`Dispatcher` VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`ConnId` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`Destination` VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`Dispatched` BIGINT NOT NULL DEFAULT 0,
	`Failed` BIGINT NOT NULL DEFAULT 0,
	`Expired` BIGINT NOT NULL DEFAULT 0,
	`Retried` BIGINT NOT NULL DEFAULT 0,
	`Late0` BIGINT NOT NULL DEFAULT 0,
	`Late1` BIGINT NOT NULL DEFAULT 0,
	`Late2` BIGINT NOT NULL DEFAULT 0,
	`Late3` BIGINT NOT NULL DEFAULT 0,
	`Late4` BIGINT NOT NULL DEFAULT 0,
	`Late5` BIGINT NOT NULL DEFAULT 0,
	`Late6` BIGINT NOT NULL DEFAULT 0,
	`Late7` BIGINT NOT NULL DEFAULT 0,
	`Late8` BIGINT NOT NULL DEFAULT 0,
	`MaxLate` DOUBLE NOT NULL DEFAULT 0,
	PRIMARY KEY (`At`, `Seconds`, `Dispatcher`, `ConnId`, `Destination`)
);

CREATE TABLE IF NOT EXISTS `the_schema`.`delayed_messages_cancelled` (
	`Id` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`Destination` VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`State` LONGBLOB NOT NULL,
	`Time` DATETIME(6) NOT NULL,
	`Headers` LONGBLOB NOT NULL,
	`RetryCount` INTEGER NOT NULL DEFAULT 0,
	`DeliverConnId` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Tag` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`ExpiresAt` DATETIME(6),
	`Digest` VARBINARY(16),
	`StoredAt` DATETIME(6),
	`NextTry` DATETIME(6),
	`LastError` VARCHAR(1000) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Run` BIGINT,
	`ReplacedAt` DATETIME(6),
	`Reason` VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`FailedAt` DATETIME(6),
	`Until` DATETIME(6) NOT NULL,
	PRIMARY KEY (`Id`),
	INDEX `delayed_messages_cancelled_Run` (`Run`, `Time`),
	INDEX `delayed_messages_cancelled_Time` (`Time`),
	INDEX `delayed_messages_cancelled_Until` (`Until`)
);

CREATE TABLE IF NOT EXISTS `the_schema`.`delayed_messages_jobs` (
	`Seq` BIGINT NOT NULL,
	`Total` BIGINT NOT NULL,
	`State` VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
	`SeenAt` DATETIME(6) NOT NULL,
	`EndedAt` DATETIME(6),
	`StoppedBy` VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	`Problem` VARCHAR(1000) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
	PRIMARY KEY (`Seq`)
);

CREATE TABLE IF NOT EXISTS `the_schema`.`delayed_messages_version` (
	`Version` INTEGER NOT NULL,
	`At` DATETIME(6) NOT NULL,
	PRIMARY KEY (`Version`)
);

INSERT INTO `the_schema`.`delayed_messages_version` (`Version`, `At`) SELECT 5 AS `Version`, (SELECT UTC_TIMESTAMP(6)) FROM DUAL
WHERE NOT (EXISTS (SELECT *
FROM `the_schema`.`delayed_messages_version`));
