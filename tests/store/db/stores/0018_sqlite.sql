CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT pk_alembic_version PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0018');
CREATE TABLE assignment_labels (
	assignment_id VARCHAR(32) NOT NULL,
	label_id INTEGER NOT NULL,
	CONSTRAINT pk_assignment_labels PRIMARY KEY (assignment_id),
	CONSTRAINT fk_assignment_labels_assignment_id FOREIGN KEY(assignment_id) REFERENCES assignments (id),
	CONSTRAINT fk_assignment_labels_label_id FOREIGN KEY(label_id) REFERENCES labels (id)
);
INSERT INTO "assignment_labels" VALUES('04040404040404040404040404040404',1);
INSERT INTO "assignment_labels" VALUES('0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a',2);
INSERT INTO "assignment_labels" VALUES('0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b',3);
CREATE TABLE assignments (
	id VARCHAR(32) NOT NULL,
	campaign_id VARCHAR(16) NOT NULL,
	round_number INTEGER NOT NULL,
	configuration_id VARCHAR(20) NOT NULL,
	device_key VARCHAR(64) NOT NULL,
	role VARCHAR(16) NOT NULL,
	rank INTEGER NOT NULL,
	reason JSON NOT NULL,
	state VARCHAR(16) NOT NULL,
	attempts INTEGER NOT NULL,
	failures INTEGER NOT NULL,
	worker VARCHAR(200),
	CONSTRAINT pk_assignments PRIMARY KEY (id),
	CONSTRAINT fk_assignments_campaign_id_round_number FOREIGN KEY(campaign_id, round_number) REFERENCES rounds (campaign_id, number),
	CONSTRAINT fk_assignments_campaign_id_configuration_id FOREIGN KEY(campaign_id, configuration_id) REFERENCES campaign_pool (campaign_id, configuration_id),
	CONSTRAINT uq_assignments_campaign_id_configuration_id_device_key UNIQUE (campaign_id, configuration_id, device_key),
	CONSTRAINT ck_assignments_worker CHECK ((worker IS NOT NULL) = (state = 'leased')),
	CONSTRAINT ck_assignments_attempts CHECK (failures BETWEEN 0 AND attempts),
	CONSTRAINT ck_assignments_role CHECK (role IN ('train', 'evaluate')),
	CONSTRAINT ck_assignments_assignmentstate CHECK (state IN ('open', 'leased', 'done', 'failed'))
);
INSERT INTO "assignments" VALUES('04040404040404040404040404040404','02020202',0,'0039b0dfddc571874466','cpu-2t','evaluate',0,'{"score": 0.5}','done',1,0,NULL);
INSERT INTO "assignments" VALUES('0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a','02020202',1,'b95230515aa9df061193','cpu-2t','train',0,'{"score": 0.5}','done',1,0,NULL);
INSERT INTO "assignments" VALUES('0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b','02020202',1,'52ddbfc82d56465b7834','cpu-2t','train',1,'{"score": 0.5}','done',1,0,NULL);
INSERT INTO "assignments" VALUES('0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c','02020202',1,'083e34d663c523058f6f','cpu-2t','train',2,'{"score": 0.5}','done',1,0,NULL);
INSERT INTO "assignments" VALUES('0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d','02020202',1,'4b0510117e92499d7369','cpu-2t','train',3,'{"score": 0.5}','leased',1,0,'w');
CREATE TABLE campaign_pool (
	campaign_id VARCHAR(16) NOT NULL,
	configuration_id VARCHAR(20) NOT NULL,
	held_out BOOLEAN NOT NULL,
	CONSTRAINT pk_campaign_pool PRIMARY KEY (campaign_id, configuration_id),
	CONSTRAINT fk_campaign_pool_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id),
	CONSTRAINT fk_campaign_pool_configuration_id FOREIGN KEY(configuration_id) REFERENCES configurations (id)
);
INSERT INTO "campaign_pool" VALUES('02020202','b95230515aa9df061193',0);
INSERT INTO "campaign_pool" VALUES('02020202','52ddbfc82d56465b7834',0);
INSERT INTO "campaign_pool" VALUES('02020202','083e34d663c523058f6f',0);
INSERT INTO "campaign_pool" VALUES('02020202','4b0510117e92499d7369',0);
INSERT INTO "campaign_pool" VALUES('02020202','982935b9e7ea902a2600',0);
INSERT INTO "campaign_pool" VALUES('02020202','0039b0dfddc571874466',1);
CREATE TABLE campaigns (
	id VARCHAR(16) NOT NULL,
	name VARCHAR(200) NOT NULL,
	spec JSON NOT NULL,
	seed INTEGER NOT NULL,
	state VARCHAR(16) NOT NULL,
	created_at DATETIME NOT NULL,
	finished_at DATETIME,
	snapshot VARCHAR(64),
	owner_id VARCHAR(32),
	owner_process JSON,
	owned_since DATETIME,
	owner_seen_at DATETIME,
	CONSTRAINT pk_campaigns PRIMARY KEY (id),
	CONSTRAINT ck_campaigns_finished_at CHECK ((finished_at IS NOT NULL) = (state IN ('finished', 'cancelled'))),
	CONSTRAINT ck_campaigns_owner CHECK ((owner_id IS NULL) = (owner_process IS NULL) AND (owner_id IS NULL) = (owned_since IS NULL) AND (owner_id IS NULL) = (owner_seen_at IS NULL)),
	CONSTRAINT ck_campaigns_campaignstate CHECK (state IN ('running', 'paused', 'finished', 'failed', 'cancelled'))
);
INSERT INTO "campaigns" VALUES('02020202','tiny','{"budget": 3}',7,'running','2026-11-29 06:02:59.572610',NULL,NULL,'o','{"host": "o", "machine": "machine of o", "pid": 1, "began": 1}','2026-11-29 06:02:59.670697','2026-11-29 06:02:59.600000');
CREATE TABLE canaries (
	id INTEGER NOT NULL,
	attempt_key VARCHAR(64) NOT NULL,
	taken_at DATETIME NOT NULL,
	host VARCHAR(255) NOT NULL,
	device VARCHAR(64) NOT NULL,
	stack_fingerprint VARCHAR(64) NOT NULL,
	configuration_id VARCHAR(20) NOT NULL,
	protocol VARCHAR(64) NOT NULL,
	campaign_id VARCHAR(16),
	outcome VARCHAR(16) NOT NULL,
	step_time_ms DOUBLE,
	memory_mib DOUBLE,
	power_w DOUBLE,
	reference_ms DOUBLE,
	relative_drift DOUBLE,
	decision VARCHAR(16) NOT NULL,
	message TEXT,
	CONSTRAINT pk_canaries PRIMARY KEY (id),
	CONSTRAINT ck_canaries_step_time_ms_positive CHECK (step_time_ms > 0),
	CONSTRAINT ck_canaries_memory_mib_positive CHECK (memory_mib > 0),
	CONSTRAINT ck_canaries_power_w_positive CHECK (power_w > 0),
	CONSTRAINT ck_canaries_reference_ms_positive CHECK (reference_ms > 0),
	CONSTRAINT ck_canaries_step_time CHECK (step_time_ms IS NULL OR outcome = 'ok'),
	CONSTRAINT ck_canaries_message CHECK ((message IS NULL) = (decision = 'ok')),
	CONSTRAINT uq_canaries_attempt_key UNIQUE (attempt_key),
	CONSTRAINT fk_canaries_configuration_id FOREIGN KEY(configuration_id) REFERENCES configurations (id),
	CONSTRAINT fk_canaries_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id),
	CONSTRAINT ck_canaries_outcome CHECK (outcome IN ('ok', 'oom', 'timeout', 'unsupported', 'unstable', 'error')),
	CONSTRAINT ck_canaries_canarydecision CHECK (decision IN ('ok', 'drifting', 'stop'))
);
INSERT INTO "canaries" VALUES(1,'canary','2026-01-02 03:04:05.000000','here','cpu-2t','f','b95230515aa9df061193','quick','02020202','ok',12.0,300.0,NULL,NULL,NULL,'ok',NULL);
CREATE TABLE configurations (
	id VARCHAR(20) NOT NULL,
	architecture VARCHAR(200) NOT NULL,
	family VARCHAR(64) NOT NULL,
	batch_size INTEGER NOT NULL,
	input_size INTEGER NOT NULL,
	precision VARCHAR(16) NOT NULL,
	memory_format VARCHAR(16) NOT NULL,
	optimizer VARCHAR(16) NOT NULL,
	phase VARCHAR(16) NOT NULL,
	execution VARCHAR(16) NOT NULL,
	CONSTRAINT pk_configurations PRIMARY KEY (id),
	CONSTRAINT ck_configurations_batch_size_positive CHECK (batch_size > 0),
	CONSTRAINT ck_configurations_input_size_positive CHECK (input_size > 0)
);
INSERT INTO "configurations" VALUES('b95230515aa9df061193','resnet18','resnet',1,64,'fp32','contiguous','sgd','train','eager');
INSERT INTO "configurations" VALUES('52ddbfc82d56465b7834','resnet18','resnet',2,64,'fp32','contiguous','sgd','train','eager');
INSERT INTO "configurations" VALUES('083e34d663c523058f6f','resnet18','resnet',3,64,'fp32','contiguous','sgd','train','eager');
INSERT INTO "configurations" VALUES('4b0510117e92499d7369','resnet18','resnet',4,64,'fp32','contiguous','sgd','train','eager');
INSERT INTO "configurations" VALUES('982935b9e7ea902a2600','resnet18','resnet',5,64,'fp32','contiguous','sgd','train','eager');
INSERT INTO "configurations" VALUES('0039b0dfddc571874466','vgg11','vgg',1,64,'fp32','contiguous','sgd','train','eager');
CREATE TABLE devices (
	id INTEGER NOT NULL,
	"key" VARCHAR(64) NOT NULL,
	fingerprint VARCHAR(64) NOT NULL,
	environment JSON NOT NULL,
	CONSTRAINT pk_devices PRIMARY KEY (id),
	CONSTRAINT uq_devices_key_fingerprint UNIQUE ("key", fingerprint)
);
INSERT INTO "devices" VALUES(1,'cpu-2t','4632e3716261d7e2','{"device": "cpu-2t", "torch": "2.13.0", "host": "here", "load_average_before": 0.25}');
CREATE TABLE events (
	id INTEGER NOT NULL,
	campaign_id VARCHAR(16) NOT NULL,
	at DATETIME NOT NULL,
	kind VARCHAR(64) NOT NULL,
	message JSON NOT NULL,
	CONSTRAINT pk_events PRIMARY KEY (id),
	CONSTRAINT fk_events_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id)
);
INSERT INTO "events" VALUES(1,'02020202','2026-11-29 06:02:59.651727','note','{"message": "hello"}');
CREATE TABLE graphs (
	content_hash VARCHAR(64) NOT NULL,
	template BLOB NOT NULL,
	node_count INTEGER NOT NULL,
	CONSTRAINT pk_graphs PRIMARY KEY (content_hash),
	CONSTRAINT ck_graphs_node_count_positive CHECK (node_count > 0)
);
CREATE TABLE labels (
	id INTEGER NOT NULL,
	configuration_id VARCHAR(20) NOT NULL,
	device_id INTEGER NOT NULL,
	protocol_name VARCHAR(64) NOT NULL,
	measurement_id INTEGER NOT NULL,
	outcome VARCHAR(16) NOT NULL,
	provenance VARCHAR(16) NOT NULL,
	step_time_ms DOUBLE,
	memory_mib DOUBLE,
	memory_above_mib DOUBLE,
	power_w DOUBLE,
	energy_j DOUBLE,
	created_at DATETIME NOT NULL,
	CONSTRAINT pk_labels PRIMARY KEY (id),
	CONSTRAINT fk_labels_measurement_id_outcome FOREIGN KEY(measurement_id, outcome) REFERENCES measurements (id, outcome),
	CONSTRAINT uq_labels_configuration_id_device_id_protocol_name UNIQUE (configuration_id, device_id, protocol_name),
	CONSTRAINT ck_labels_step_time_ms_positive CHECK (step_time_ms > 0),
	CONSTRAINT ck_labels_memory_mib_positive CHECK (memory_mib > 0),
	CONSTRAINT ck_labels_memory_above_mib_positive CHECK (memory_above_mib > 0),
	CONSTRAINT ck_labels_power_w_positive CHECK (power_w > 0),
	CONSTRAINT ck_labels_energy_j_positive CHECK (energy_j > 0),
	CONSTRAINT ck_labels_some_metric CHECK (step_time_ms IS NOT NULL OR memory_mib IS NOT NULL OR power_w IS NOT NULL OR memory_above_mib IS NOT NULL),
	CONSTRAINT ck_labels_value_or_bound CHECK (memory_mib IS NULL OR memory_above_mib IS NULL),
	CONSTRAINT ck_labels_ok_or_censored CHECK ((outcome = 'ok' AND memory_above_mib IS NULL) OR (outcome = 'oom' AND memory_above_mib IS NOT NULL)),
	CONSTRAINT fk_labels_configuration_id FOREIGN KEY(configuration_id) REFERENCES configurations (id),
	CONSTRAINT fk_labels_device_id FOREIGN KEY(device_id) REFERENCES devices (id),
	CONSTRAINT uq_labels_measurement_id UNIQUE (measurement_id),
	CONSTRAINT ck_labels_outcome CHECK (outcome IN ('ok', 'oom', 'timeout', 'unsupported', 'unstable', 'error')),
	CONSTRAINT ck_labels_provenance CHECK (provenance IN ('measured', 'imported', 'simulated'))
);
INSERT INTO "labels" VALUES(1,'0039b0dfddc571874466',1,'quick',1,'ok','measured',12.5,321.5,NULL,NULL,NULL,'2026-11-29 06:02:59.608678');
INSERT INTO "labels" VALUES(2,'b95230515aa9df061193',1,'quick',2,'ok','measured',12.5,321.5,NULL,50.0,NULL,'2026-11-29 06:02:59.628512');
INSERT INTO "labels" VALUES(3,'52ddbfc82d56465b7834',1,'quick',3,'oom','measured',NULL,NULL,4096.0,NULL,NULL,'2026-11-29 06:02:59.636961');
CREATE TABLE measurements (
	id INTEGER NOT NULL,
	attempt_key VARCHAR(64) NOT NULL,
	configuration_id VARCHAR(20) NOT NULL,
	device_id INTEGER NOT NULL,
	protocol_name VARCHAR(64) NOT NULL,
	protocol JSON NOT NULL,
	campaign_id VARCHAR(16),
	assignment_id VARCHAR(32),
	provenance VARCHAR(16) NOT NULL,
	outcome VARCHAR(16) NOT NULL,
	failed_in VARCHAR(16),
	message TEXT,
	started_at DATETIME NOT NULL,
	duration_s DOUBLE NOT NULL,
	step_samples_ms BLOB NOT NULL,
	step_median_ms DOUBLE,
	step_mean_ms DOUBLE,
	step_iqr_ms DOUBLE,
	step_p95_ms DOUBLE,
	step_forward_share DOUBLE,
	step_backward_share DOUBLE,
	step_optimizer_share DOUBLE,
	memory_mib DOUBLE,
	power_w DOUBLE,
	energy_j DOUBLE,
	memory_detail_mib JSON NOT NULL,
	missing JSON NOT NULL,
	environment JSON NOT NULL,
	CONSTRAINT pk_measurements PRIMARY KEY (id),
	CONSTRAINT ck_measurements_step_median_ms_positive CHECK (step_median_ms > 0),
	CONSTRAINT ck_measurements_step_mean_ms_positive CHECK (step_mean_ms > 0),
	CONSTRAINT ck_measurements_step_p95_ms_positive CHECK (step_p95_ms > 0),
	CONSTRAINT ck_measurements_memory_mib_positive CHECK (memory_mib > 0),
	CONSTRAINT ck_measurements_power_w_positive CHECK (power_w > 0),
	CONSTRAINT ck_measurements_energy_j_positive CHECK (energy_j > 0),
	CONSTRAINT ck_measurements_step_iqr_ms CHECK (step_iqr_ms >= 0),
	CONSTRAINT ck_measurements_step_summary CHECK ((step_median_ms IS NULL) = (step_mean_ms IS NULL) AND (step_median_ms IS NULL) = (step_iqr_ms IS NULL) AND (step_median_ms IS NULL) = (step_p95_ms IS NULL)),
	CONSTRAINT ck_measurements_duration_s CHECK (duration_s >= 0),
	CONSTRAINT uq_measurements_attempt_key UNIQUE (attempt_key),
	CONSTRAINT fk_measurements_configuration_id FOREIGN KEY(configuration_id) REFERENCES configurations (id),
	CONSTRAINT fk_measurements_device_id FOREIGN KEY(device_id) REFERENCES devices (id),
	CONSTRAINT fk_measurements_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id),
	CONSTRAINT fk_measurements_assignment_id FOREIGN KEY(assignment_id) REFERENCES assignments (id),
	CONSTRAINT ck_measurements_provenance CHECK (provenance IN ('measured', 'imported', 'simulated')),
	CONSTRAINT ck_measurements_outcome CHECK (outcome IN ('ok', 'oom', 'timeout', 'unsupported', 'unstable', 'error'))
);
INSERT INTO "measurements" VALUES(1,'04040404040404040404040404040404-1','0039b0dfddc571874466',1,'quick','{"name": "quick", "warmup_steps": 5, "min_steps": 50, "max_steps": 50, "max_seconds": 60.0, "target_relative_error": 0.0, "timeout_s": 300.0, "power_window_s": 2.0, "power_share": 1.0, "unstable_relative_iqr": 0.25, "unstable_lost_share": 0.1}','02020202','04040404040404040404040404040404','measured','ok',NULL,NULL,'2026-01-02 03:04:05.678901',3.25,X'000040410000484100005441',12.5,12.6,0.5,13.5,NULL,NULL,NULL,321.5,NULL,NULL,'{"peak": 321.5}','{"power_w": "no meter", "energy_j": "no meter"}','{"device": "cpu-2t", "torch": "2.13.0", "host": "here", "load_average_before": 0.25}');
INSERT INTO "measurements" VALUES(2,'0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a-1','b95230515aa9df061193',1,'quick','{"name": "quick", "warmup_steps": 5, "min_steps": 50, "max_steps": 50, "max_seconds": 60.0, "target_relative_error": 0.0, "timeout_s": 300.0, "power_window_s": 2.0, "power_share": 1.0, "unstable_relative_iqr": 0.25, "unstable_lost_share": 0.1}','02020202','0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a','measured','ok',NULL,NULL,'2026-01-02 03:04:05.678901',3.25,X'000040410000484100005441',12.5,12.6,0.5,13.5,NULL,NULL,NULL,321.5,50.0,NULL,'{"peak": 321.5}','{"power_w": "no meter", "energy_j": "no meter"}','{"device": "cpu-2t", "torch": "2.13.0", "host": "here", "load_average_before": 0.25}');
INSERT INTO "measurements" VALUES(3,'0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b-1','52ddbfc82d56465b7834',1,'quick','{"name": "quick", "warmup_steps": 5, "min_steps": 50, "max_steps": 50, "max_seconds": 60.0, "target_relative_error": 0.0, "timeout_s": 300.0, "power_window_s": 2.0, "power_share": 1.0, "unstable_relative_iqr": 0.25, "unstable_lost_share": 0.1}','02020202','0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b','measured','oom','measure','ended as oom','2026-01-02 03:04:05.678901',3.25,X'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'{"capacity": 4096.0}','{"power_w": "no meter", "energy_j": "no meter"}','{"device": "cpu-2t", "torch": "2.13.0", "host": "here", "load_average_before": 0.25}');
INSERT INTO "measurements" VALUES(4,'0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c-1','083e34d663c523058f6f',1,'quick','{"name": "quick", "warmup_steps": 5, "min_steps": 50, "max_steps": 50, "max_seconds": 60.0, "target_relative_error": 0.0, "timeout_s": 300.0, "power_window_s": 2.0, "power_share": 1.0, "unstable_relative_iqr": 0.25, "unstable_lost_share": 0.1}','02020202','0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c','measured','unsupported','measure','ended as unsupported','2026-01-02 03:04:05.678901',3.25,X'',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'{}','{"power_w": "no meter", "energy_j": "no meter"}','{"device": "cpu-2t", "torch": "2.13.0", "host": "here", "load_average_before": 0.25}');
CREATE TABLE pool_members (
	pool VARCHAR(64) NOT NULL,
	configuration_id VARCHAR(20) NOT NULL,
	CONSTRAINT pk_pool_members PRIMARY KEY (pool, configuration_id),
	CONSTRAINT fk_pool_members_configuration_id FOREIGN KEY(configuration_id) REFERENCES configurations (id)
);
INSERT INTO "pool_members" VALUES('tiny','b95230515aa9df061193');
INSERT INTO "pool_members" VALUES('tiny','52ddbfc82d56465b7834');
INSERT INTO "pool_members" VALUES('tiny','083e34d663c523058f6f');
INSERT INTO "pool_members" VALUES('tiny','4b0510117e92499d7369');
INSERT INTO "pool_members" VALUES('tiny','982935b9e7ea902a2600');
CREATE TABLE rounds (
	campaign_id VARCHAR(16) NOT NULL,
	number INTEGER NOT NULL,
	purpose VARCHAR(16) NOT NULL,
	report JSON,
	CONSTRAINT pk_rounds PRIMARY KEY (campaign_id, number),
	CONSTRAINT ck_rounds_number CHECK (number >= 0),
	CONSTRAINT fk_rounds_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id),
	CONSTRAINT ck_rounds_purpose CHECK (purpose IN ('evaluation', 'initial', 'acquired'))
);
INSERT INTO "rounds" VALUES('02020202',0,'evaluation','{"error": 0.5}');
INSERT INTO "rounds" VALUES('02020202',1,'initial',NULL);
CREATE TABLE traces (
	digest VARCHAR(32) NOT NULL,
	architecture VARCHAR(200) NOT NULL,
	input_size INTEGER,
	precision VARCHAR(16) NOT NULL,
	memory_format VARCHAR(16) NOT NULL,
	execution VARCHAR(16) NOT NULL,
	fused_attention BOOLEAN NOT NULL,
	phase VARCHAR(16) NOT NULL,
	graph_hash VARCHAR(64),
	refusal TEXT,
	data BLOB,
	size INTEGER NOT NULL,
	created_at DATETIME NOT NULL,
	CONSTRAINT pk_traces PRIMARY KEY (digest),
	CONSTRAINT ck_traces_step_or_refusal CHECK (data IS NOT NULL OR refusal IS NOT NULL),
	CONSTRAINT ck_traces_graph_of_step CHECK (data IS NOT NULL OR graph_hash IS NULL),
	CONSTRAINT fk_traces_graph_hash FOREIGN KEY(graph_hash) REFERENCES graphs (content_hash)
);
CREATE INDEX ix_graphs_node_count ON graphs (node_count);
CREATE INDEX ix_configurations_architecture ON configurations (architecture);
CREATE INDEX ix_configurations_family_architecture_batch_size_input_size ON configurations (family, architecture, batch_size, input_size);
CREATE INDEX ix_traces_architecture ON traces (architecture);
CREATE INDEX ix_traces_graph_hash ON traces (graph_hash);
CREATE INDEX ix_traces_created_at_size ON traces (created_at, size);
CREATE INDEX ix_canaries_campaign_id ON canaries (campaign_id);
CREATE INDEX ix_canaries_device_stack_fingerprint_host_taken_at ON canaries (device, stack_fingerprint, host, taken_at);
CREATE INDEX ix_events_campaign_id ON events (campaign_id);
CREATE INDEX ix_assignments_campaign_id_device_key_state_round_number_rank ON assignments (campaign_id, device_key, state, round_number, rank);
CREATE INDEX ix_measurements_started_at ON measurements (started_at);
CREATE INDEX ix_measurements_campaign_id ON measurements (campaign_id);
CREATE UNIQUE INDEX ix_measurements_outcome_id ON measurements (outcome, id);
CREATE INDEX ix_measurements_assignment_id ON measurements (assignment_id);
CREATE INDEX ix_measurements_configuration_id_device_id ON measurements (configuration_id, device_id);
CREATE INDEX ix_labels_created_at ON labels (created_at);
CREATE INDEX ix_labels_device_id ON labels (device_id);
CREATE INDEX ix_assignment_labels_label_id ON assignment_labels (label_id);
