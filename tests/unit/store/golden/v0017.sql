BEGIN TRANSACTION;
CREATE TABLE adapters (
	name VARCHAR NOT NULL, 
	capability VARCHAR NOT NULL, 
	version INTEGER NOT NULL, 
	path TEXT NOT NULL, 
	files JSON NOT NULL, 
	cycle_id VARCHAR NOT NULL, 
	training_run_id VARCHAR NOT NULL, 
	environment_hash VARCHAR NOT NULL, 
	created_at DATETIME NOT NULL, quarantined_at DATETIME, quarantine_reason TEXT DEFAULT '' NOT NULL, 
	CONSTRAINT pk_adapters PRIMARY KEY (name), 
	CONSTRAINT fk_adapters_cycle_id FOREIGN KEY(cycle_id) REFERENCES cycles (id), 
	CONSTRAINT fk_adapters_environment_hash FOREIGN KEY(environment_hash) REFERENCES environments (hash), 
	CONSTRAINT fk_adapters_training_run_id FOREIGN KEY(training_run_id) REFERENCES training_runs (id), 
	CONSTRAINT uq_adapters_capability_version UNIQUE (capability, version)
);
INSERT INTO "adapters" VALUES('date-reasoning@v1','date-reasoning',1,'/data/date-reasoning@v1','{"adapter_model.safetensors":"0000000000000000000000000000000000000000000000000000000000000001"}','c1','r1','ad156ed4d50318e6a2858e1fd6e27f832a0de55ea2806978ba7de506307c036b','2026-03-14 09:26:58.589793',NULL,'');
CREATE TABLE admission_checks (
	admission_id VARCHAR NOT NULL, 
	position INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	passed BOOLEAN NOT NULL, 
	evidence JSON NOT NULL, 
	seconds FLOAT NOT NULL, 
	CONSTRAINT pk_admission_checks PRIMARY KEY (admission_id, position), 
	CONSTRAINT fk_admission_checks_admission_id FOREIGN KEY(admission_id) REFERENCES admissions (id)
);
INSERT INTO "admission_checks" VALUES('517e2de5b5e82f6764baafd43acb977729957950164dba2db08a4aec3ea4cf35',0,'oracle',1,'{"seeds":[1,2]}',0.5);
INSERT INTO "admission_checks" VALUES('517e2de5b5e82f6764baafd43acb977729957950164dba2db08a4aec3ea4cf35',1,'floor',1,'{}',0.25);
CREATE TABLE admissions (
	seq INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	environment_hash VARCHAR NOT NULL, 
	cycle_id VARCHAR NOT NULL, 
	admitted BOOLEAN NOT NULL, 
	at DATETIME NOT NULL, 
	CONSTRAINT pk_admissions PRIMARY KEY (seq), 
	CONSTRAINT fk_admissions_cycle_id FOREIGN KEY(cycle_id) REFERENCES cycles (id), 
	CONSTRAINT fk_admissions_environment_hash FOREIGN KEY(environment_hash) REFERENCES environments (hash), 
	CONSTRAINT uq_admissions_id UNIQUE (id)
);
INSERT INTO "admissions" VALUES(1,'517e2de5b5e82f6764baafd43acb977729957950164dba2db08a4aec3ea4cf35','ad156ed4d50318e6a2858e1fd6e27f832a0de55ea2806978ba7de506307c036b','c1',1,'2026-03-14 09:26:56.589793');
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0017');
CREATE TABLE api_tokens (
	name VARCHAR NOT NULL, 
	role VARCHAR NOT NULL, 
	hash VARCHAR NOT NULL, 
	created_at DATETIME NOT NULL, 
	created_by TEXT NOT NULL, 
	revoked_at DATETIME, 
	CONSTRAINT pk_api_tokens PRIMARY KEY (name), 
	CONSTRAINT uq_api_tokens_hash UNIQUE (hash)
);
CREATE TABLE approvals (
	seq INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	adapter VARCHAR NOT NULL, 
	gate_id VARCHAR, 
	decision VARCHAR NOT NULL, 
	who TEXT NOT NULL, 
	at DATETIME NOT NULL, 
	reason TEXT NOT NULL, 
	CONSTRAINT pk_approvals PRIMARY KEY (seq), 
	CONSTRAINT fk_approvals_adapter FOREIGN KEY(adapter) REFERENCES adapters (name), 
	CONSTRAINT fk_approvals_gate_id FOREIGN KEY(gate_id) REFERENCES gate_results (id), 
	CONSTRAINT uq_approvals_id UNIQUE (id)
);
INSERT INTO "approvals" VALUES(1,'ae9a2dbd475321b223347817294d3ad4de1764bd367ffa10529c8273d4601343','date-reasoning@v1','9f8e58b7809cf2900af0ef92216525aeae026b910976c4ab668b250cc09e1505','approved','Ada','2026-03-14 09:27:00.589793','looks right');
CREATE TABLE attempts (
	seq INTEGER NOT NULL, 
	cycle_id VARCHAR NOT NULL, 
	stage VARCHAR NOT NULL, 
	capability VARCHAR NOT NULL, 
	input_hash VARCHAR NOT NULL, 
	number INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	holder VARCHAR NOT NULL, 
	pid INTEGER, 
	started_at DATETIME NOT NULL, 
	heartbeat_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	evidence JSON NOT NULL, 
	CONSTRAINT pk_attempts PRIMARY KEY (seq), 
	CONSTRAINT fk_attempts_cycle_id FOREIGN KEY(cycle_id) REFERENCES cycles (id), 
	CONSTRAINT uq_attempts_cycle_id_stage_capability_input_hash_number UNIQUE (cycle_id, stage, capability, input_hash, number)
);
CREATE TABLE audit (
	seq INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	who TEXT NOT NULL, 
	role VARCHAR NOT NULL, 
	action VARCHAR NOT NULL, 
	subject TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	detail JSON NOT NULL, hash VARCHAR DEFAULT '' NOT NULL, 
	CONSTRAINT pk_audit PRIMARY KEY (seq)
);
CREATE TABLE capabilities (
	cycle_id VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	title TEXT NOT NULL, 
	description TEXT NOT NULL, 
	when_needed TEXT NOT NULL, 
	exercised TEXT NOT NULL, 
	lacking TEXT NOT NULL, 
	CONSTRAINT pk_capabilities PRIMARY KEY (cycle_id, name), 
	CONSTRAINT fk_capabilities_cycle_id FOREIGN KEY(cycle_id) REFERENCES cycles (id)
);
INSERT INTO "capabilities" VALUES('c1','date-reasoning','Date reasoning','Counts days.','a date is asked','counts','miscounts');
CREATE TABLE citations (
	cycle_id VARCHAR NOT NULL, 
	capability VARCHAR NOT NULL, 
	position INTEGER NOT NULL, 
	trajectory_id VARCHAR NOT NULL, 
	message_index INTEGER NOT NULL, reason TEXT DEFAULT '' NOT NULL, policy TEXT DEFAULT '' NOT NULL, 
	CONSTRAINT pk_citations PRIMARY KEY (cycle_id, capability, position), 
	CONSTRAINT fk_citations_cycle_id FOREIGN KEY(cycle_id, capability) REFERENCES capabilities (cycle_id, name), 
	CONSTRAINT fk_citations_trajectory_id FOREIGN KEY(trajectory_id) REFERENCES trajectories (id)
);
INSERT INTO "citations" VALUES('c1','date-reasoning',0,'t1',2,'','');
CREATE TABLE compositions (
	cycle_id VARCHAR NOT NULL, 
	document TEXT NOT NULL, 
	at DATETIME NOT NULL, 
	CONSTRAINT pk_compositions PRIMARY KEY (cycle_id)
);
CREATE TABLE conversation_positions (
	digest VARCHAR NOT NULL, 
	conversation_id VARCHAR NOT NULL, 
	system VARCHAR NOT NULL, 
	separators VARCHAR NOT NULL, 
	at DATETIME NOT NULL, 
	CONSTRAINT pk_conversation_positions PRIMARY KEY (digest, conversation_id)
);
CREATE TABLE conversations (
	id VARCHAR NOT NULL, 
	model VARCHAR NOT NULL, 
	logprobs JSON NOT NULL, 
	seconds FLOAT NOT NULL, 
	why TEXT NOT NULL, 
	at DATETIME NOT NULL, trial INTEGER, is_failure BOOLEAN DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_conversations PRIMARY KEY (id)
);
INSERT INTO "conversations" VALUES('conv-1','date-reasoning@v1','{"date-reasoning@v1":-0.1}',0.02,'','2026-03-14 09:27:02.589793',NULL,0);
CREATE TABLE customer_keys (
	id INTEGER NOT NULL, 
	"key" VARCHAR NOT NULL, 
	CONSTRAINT pk_customer_keys PRIMARY KEY (id)
);
INSERT INTO "customer_keys" VALUES(1,'0000000000000000000000000000000000000000000000000000000000000000');
CREATE TABLE cycles (
	id VARCHAR NOT NULL, 
	target VARCHAR NOT NULL, 
	model VARCHAR NOT NULL, 
	seed BIGINT NOT NULL, 
	config JSON NOT NULL, 
	state VARCHAR NOT NULL, 
	created_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	summary JSON NOT NULL, 
	CONSTRAINT pk_cycles PRIMARY KEY (id)
);
INSERT INTO "cycles" VALUES('c1','desk','bundled',7,'{"delta":0.2}','running','2026-03-14 09:26:53.589793',NULL,'{}');
CREATE TABLE engines (
	url VARCHAR NOT NULL, 
	added_at DATETIME NOT NULL, 
	CONSTRAINT pk_engines PRIMARY KEY (url)
);
INSERT INTO "engines" VALUES('http://10.0.0.5:8000','2026-03-14 09:27:02.589793');
CREATE TABLE environment_origins (
	environment_hash VARCHAR NOT NULL, 
	cycle_id VARCHAR NOT NULL, 
	capability VARCHAR NOT NULL, 
	seed BIGINT NOT NULL, 
	synthesizer VARCHAR NOT NULL, 
	at DATETIME NOT NULL, repairs VARCHAR, 
	CONSTRAINT pk_environment_origins PRIMARY KEY (environment_hash, cycle_id, capability), 
	CONSTRAINT fk_environment_origins_cycle_id_capability FOREIGN KEY(cycle_id, capability) REFERENCES capabilities (cycle_id, name), 
	CONSTRAINT fk_environment_origins_environment_hash FOREIGN KEY(environment_hash) REFERENCES environments (hash)
);
INSERT INTO "environment_origins" VALUES('ad156ed4d50318e6a2858e1fd6e27f832a0de55ea2806978ba7de506307c036b','c1','date-reasoning',7,'builtin','2026-03-14 09:26:55.589793',NULL);
CREATE TABLE environments (
	hash VARCHAR NOT NULL, 
	source_code TEXT NOT NULL, 
	CONSTRAINT pk_environments PRIMARY KEY (hash)
);
INSERT INTO "environments" VALUES('ad156ed4d50318e6a2858e1fd6e27f832a0de55ea2806978ba7de506307c036b','class Environment:
    ''''''café''''''
');
CREATE TABLE events (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at DATETIME NOT NULL, 
	kind VARCHAR NOT NULL, 
	cycle_id VARCHAR, 
	subject TEXT NOT NULL, 
	detail JSON NOT NULL
);
CREATE TABLE exchanges (
	id VARCHAR NOT NULL, 
	conversation_id VARCHAR NOT NULL, 
	at DATETIME NOT NULL, 
	model VARCHAR NOT NULL, 
	status INTEGER NOT NULL, 
	seconds FLOAT NOT NULL, 
	prompt_tokens INTEGER NOT NULL, 
	completion_tokens INTEGER NOT NULL, 
	key_id VARCHAR NOT NULL, 
	response_id VARCHAR NOT NULL, 
	detail TEXT NOT NULL, 
	body BLOB, 
	settled_at DATETIME, 
	trajectory_id VARCHAR, shadow_of VARCHAR, target VARCHAR DEFAULT '' NOT NULL, customer VARCHAR DEFAULT '' NOT NULL, started_at DATETIME, 
	CONSTRAINT pk_exchanges PRIMARY KEY (id)
);
INSERT INTO "exchanges" VALUES('exchange-1','conv-1','2026-03-14 09:27:03.589793','date-reasoning@v1',200,0.5,3,2,'','','',X'28B52FFD20B20D0400F2881B1C80A76903DD515BAC986C54D8DD502242B0633109054E294893A047054BA9E4CCF902BD6333ACE564438C44FA64B3BCE8040268D6FCFE3879909418B0276CFE71CE8B191F1A8B2E19B0F988B20A716D86658272D2A0404651B079EF7B886C9CD7C4E62B4C2F00663D71547F780905009F104B884AAF705797BD940E0A0A',NULL,NULL,NULL,'acme','c0ffee','2026-03-14 09:27:02.589793');
CREATE TABLE faults (
	cycle_id VARCHAR NOT NULL, 
	trajectory_id VARCHAR NOT NULL, 
	fault VARCHAR NOT NULL, 
	message_index INTEGER, 
	reason TEXT NOT NULL, 
	CONSTRAINT pk_faults PRIMARY KEY (cycle_id, trajectory_id), 
	CONSTRAINT fk_faults_cycle_id FOREIGN KEY(cycle_id) REFERENCES cycles (id), 
	CONSTRAINT fk_faults_trajectory_id FOREIGN KEY(trajectory_id) REFERENCES trajectories (id)
);
INSERT INTO "faults" VALUES('c1','t1','agent',2,'It miscounted. �');
CREATE TABLE feedback (
	seq INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	conversation_id VARCHAR NOT NULL, 
	response_id VARCHAR NOT NULL, 
	score FLOAT, 
	label TEXT NOT NULL, 
	comment TEXT NOT NULL, 
	who TEXT NOT NULL, 
	at DATETIME NOT NULL, 
	CONSTRAINT pk_feedback PRIMARY KEY (seq), 
	CONSTRAINT uq_feedback_id UNIQUE (id)
);
INSERT INTO "feedback" VALUES(1,'19fc7c46393800cc7f834db9caeed1856bb656cec9580d9e25a293378fd440a5','conv-1','',0.5,'','so so','Ada','2026-03-14 09:27:04.589793');
CREATE TABLE findings (
	cycle_id VARCHAR NOT NULL, 
	capability VARCHAR NOT NULL, 
	delta FLOAT, 
	coverage FLOAT, 
	er_plus FLOAT, 
	er_minus FLOAT, 
	counts JSON NOT NULL, 
	runs INTEGER NOT NULL, 
	runs_agreeing INTEGER NOT NULL, 
	retained BOOLEAN NOT NULL, agreement FLOAT, delta_low FLOAT, delta_high FLOAT, coverage_low FLOAT, coverage_high FLOAT, 
	CONSTRAINT pk_findings PRIMARY KEY (cycle_id, capability), 
	CONSTRAINT fk_findings_cycle_id_capability FOREIGN KEY(cycle_id, capability) REFERENCES capabilities (cycle_id, name)
);
INSERT INTO "findings" VALUES('c1','date-reasoning',0.9,0.5,0.0,NULL,'{"lacking_in_failures":1}',2,2,1,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE fitted_routers (
	cycle_id VARCHAR NOT NULL, 
	document TEXT NOT NULL, 
	at DATETIME NOT NULL, 
	CONSTRAINT pk_fitted_routers PRIMARY KEY (cycle_id)
);
CREATE TABLE gate_comparisons (
	gate_id VARCHAR NOT NULL, 
	position INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	seeds INTEGER NOT NULL, 
	base FLOAT NOT NULL, 
	adapter FLOAT NOT NULL, 
	difference FLOAT NOT NULL, 
	low FLOAT NOT NULL, 
	high FLOAT NOT NULL, 
	level FLOAT NOT NULL, 
	required FLOAT NOT NULL, 
	answer VARCHAR NOT NULL, 
	CONSTRAINT pk_gate_comparisons PRIMARY KEY (gate_id, position), 
	CONSTRAINT fk_gate_comparisons_gate_id FOREIGN KEY(gate_id) REFERENCES gate_results (id)
);
INSERT INTO "gate_comparisons" VALUES('9f8e58b7809cf2900af0ef92216525aeae026b910976c4ab668b250cc09e1505',0,'target',300,0.4,0.6,0.2,0.1,0.3,0.95,0.0,'pass');
CREATE TABLE gate_results (
	seq INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	adapter VARCHAR NOT NULL, 
	cycle_id VARCHAR NOT NULL, 
	answer VARCHAR NOT NULL, 
	rounds INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	CONSTRAINT pk_gate_results PRIMARY KEY (seq), 
	CONSTRAINT fk_gate_results_adapter FOREIGN KEY(adapter) REFERENCES adapters (name), 
	CONSTRAINT fk_gate_results_cycle_id FOREIGN KEY(cycle_id) REFERENCES cycles (id), 
	CONSTRAINT uq_gate_results_id UNIQUE (id)
);
INSERT INTO "gate_results" VALUES(1,'9f8e58b7809cf2900af0ef92216525aeae026b910976c4ab668b250cc09e1505','date-reasoning@v1','c1','pass',2,'2026-03-14 09:26:59.589793');
CREATE TABLE labels (
	cycle_id VARCHAR NOT NULL, 
	run INTEGER NOT NULL, 
	capability VARCHAR NOT NULL, 
	trajectory_id VARCHAR NOT NULL, 
	verdict VARCHAR NOT NULL, 
	message_index INTEGER, reason TEXT DEFAULT '' NOT NULL, policy TEXT DEFAULT '' NOT NULL, 
	CONSTRAINT pk_labels PRIMARY KEY (cycle_id, run, capability, trajectory_id), 
	CONSTRAINT fk_labels_cycle_id_capability FOREIGN KEY(cycle_id, capability) REFERENCES capabilities (cycle_id, name), 
	CONSTRAINT fk_labels_trajectory_id FOREIGN KEY(trajectory_id) REFERENCES trajectories (id)
);
INSERT INTO "labels" VALUES('c1',0,'date-reasoning','t1','lacking',2,'','');
INSERT INTO "labels" VALUES('c1',1,'date-reasoning','t1','lacking',2,'','');
INSERT INTO "labels" VALUES('c1',0,'date-reasoning','t2','na',NULL,'','');
INSERT INTO "labels" VALUES('c1',1,'date-reasoning','t2','na',NULL,'','');
CREATE TABLE leases (
	device VARCHAR NOT NULL, 
	holder VARCHAR NOT NULL, 
	purpose TEXT NOT NULL, 
	cycle_id VARCHAR, 
	acquired_at DATETIME NOT NULL, 
	heartbeat_at DATETIME NOT NULL, 
	expires_at DATETIME NOT NULL, 
	wanted_by TEXT NOT NULL, 
	wanted_at DATETIME, 
	CONSTRAINT pk_leases PRIMARY KEY (device), 
	CONSTRAINT fk_leases_cycle_id FOREIGN KEY(cycle_id) REFERENCES cycles (id)
);
CREATE TABLE model_replies (
	"key" VARCHAR NOT NULL, 
	cycle_id VARCHAR NOT NULL, 
	stage VARCHAR NOT NULL, 
	capability VARCHAR NOT NULL, 
	model VARCHAR NOT NULL, 
	said JSON NOT NULL, 
	text TEXT NOT NULL, 
	finish_reason TEXT NOT NULL, 
	prompt_tokens INTEGER NOT NULL, 
	completion_tokens INTEGER NOT NULL, 
	estimated BOOLEAN NOT NULL, 
	cost FLOAT NOT NULL, 
	seconds FLOAT NOT NULL, 
	at DATETIME NOT NULL, 
	CONSTRAINT pk_model_replies PRIMARY KEY ("key"), 
	CONSTRAINT fk_model_replies_cycle_id FOREIGN KEY(cycle_id) REFERENCES cycles (id)
);
INSERT INTO "model_replies" VALUES('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','c1','analyze','','gpt','[{"role":"system","text":"Whose fault? caf\u00e9"},{"role":"user","text":"\u2028"}]','{"fault": "agent"}','stop',900,12,0,0.0024,1.5,'2026-03-14 09:26:54.589793');
CREATE TABLE notices (
	seq INTEGER NOT NULL, 
	"key" VARCHAR NOT NULL, 
	hook VARCHAR NOT NULL, 
	body JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	tries INTEGER NOT NULL, 
	next_at DATETIME, 
	delivered_at DATETIME, 
	last_error TEXT NOT NULL, 
	CONSTRAINT pk_notices PRIMARY KEY (seq), 
	CONSTRAINT uq_notices_key_hook UNIQUE ("key", hook)
);
CREATE TABLE parked (
	seq INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	cycle_id VARCHAR NOT NULL, 
	stage VARCHAR NOT NULL, 
	capability VARCHAR NOT NULL, 
	input_hash VARCHAR NOT NULL, 
	reason TEXT NOT NULL, 
	evidence JSON NOT NULL, 
	at DATETIME NOT NULL, 
	released_at DATETIME, 
	released_by TEXT NOT NULL, 
	CONSTRAINT pk_parked PRIMARY KEY (seq), 
	CONSTRAINT fk_parked_cycle_id FOREIGN KEY(cycle_id) REFERENCES cycles (id), 
	CONSTRAINT uq_parked_id UNIQUE (id)
);
CREATE TABLE promotions (
	seq INTEGER NOT NULL, 
	adapter VARCHAR NOT NULL, 
	previous VARCHAR, 
	state VARCHAR NOT NULL, 
	who TEXT NOT NULL, 
	at DATETIME NOT NULL, 
	reason TEXT NOT NULL, share FLOAT, 
	CONSTRAINT pk_promotions PRIMARY KEY (seq), 
	CONSTRAINT fk_promotions_adapter FOREIGN KEY(adapter) REFERENCES adapters (name), 
	CONSTRAINT fk_promotions_previous FOREIGN KEY(previous) REFERENCES adapters (name)
);
INSERT INTO "promotions" VALUES(1,'date-reasoning@v1',NULL,'live','Ada','2026-03-14 09:27:01.589793','',NULL);
CREATE TABLE prompt_patches (
	id VARCHAR NOT NULL, 
	cycle_id VARCHAR NOT NULL, 
	capability VARCHAR NOT NULL, 
	text TEXT NOT NULL, 
	figures JSON NOT NULL, 
	at DATETIME NOT NULL, 
	CONSTRAINT pk_prompt_patches PRIMARY KEY (id), 
	CONSTRAINT fk_prompt_patches_cycle_id FOREIGN KEY(cycle_id, capability) REFERENCES capabilities (cycle_id, name)
);
INSERT INTO "prompt_patches" VALUES('63f763a727a123a550a5f4d725840e707380b9e4c5cbf5a2f92a03b1a9dd191a','c1','date-reasoning','Count the days one by one.','{"base":0.4,"patched":0.5}','2026-03-14 09:27:05.589793');
CREATE TABLE quotas (
	key_id VARCHAR NOT NULL, 
	tokens FLOAT NOT NULL, 
	at DATETIME NOT NULL, 
	CONSTRAINT pk_quotas PRIMARY KEY (key_id)
);
CREATE TABLE requests (
	"key" VARCHAR NOT NULL, 
	digest VARCHAR NOT NULL, 
	at DATETIME NOT NULL, 
	response JSON NOT NULL, 
	CONSTRAINT pk_requests PRIMARY KEY ("key")
);
CREATE TABLE responses (
	id VARCHAR NOT NULL, 
	key_id VARCHAR NOT NULL, 
	at DATETIME NOT NULL, 
	body BLOB NOT NULL, 
	CONSTRAINT pk_responses PRIMARY KEY (id, key_id)
);
INSERT INTO "responses" VALUES('resp_1','agent','2026-03-14 09:27:03.589793',X'28B52FFD205985020042C5111890A72D06B46AA599CA51786CF69FE1FD779E32E6F9DD91066B11C5D63DBA393940B00DB3B22F619E746842AC05878201380A730CB6154F318BC9E8D26E9F21D1AAD8BA07CD2A01000309330A');
CREATE TABLE router_keys (
	id VARCHAR NOT NULL, 
	hash VARCHAR NOT NULL, 
	per_minute INTEGER NOT NULL, 
	created_at DATETIME NOT NULL, 
	revoked_at DATETIME, target VARCHAR DEFAULT '' NOT NULL, 
	CONSTRAINT pk_router_keys PRIMARY KEY (id), 
	CONSTRAINT uq_router_keys_hash UNIQUE (hash)
);
INSERT INTO "router_keys" VALUES('agent','0000000000000000000000000000000000000000000000000000000000000000',60,'2026-03-14 09:27:02.589793',NULL,'acme');
CREATE TABLE routers (
	id VARCHAR NOT NULL, 
	seen_at DATETIME NOT NULL, 
	CONSTRAINT pk_routers PRIMARY KEY (id)
);
CREATE TABLE routing_choices (
	trajectory_id VARCHAR NOT NULL, 
	model VARCHAR NOT NULL, 
	logprobs JSON NOT NULL, 
	seconds FLOAT NOT NULL, 
	CONSTRAINT pk_routing_choices PRIMARY KEY (trajectory_id), 
	CONSTRAINT fk_routing_choices_trajectory_id FOREIGN KEY(trajectory_id) REFERENCES trajectories (id)
);
INSERT INTO "routing_choices" VALUES('t3','date-reasoning@v1','{"A":-0.1,"B":-2.5}',0.01);
CREATE TABLE stage_events (
	seq INTEGER NOT NULL, 
	id VARCHAR NOT NULL, 
	cycle_id VARCHAR NOT NULL, 
	stage VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	capability VARCHAR, 
	at DATETIME NOT NULL, 
	detail JSON NOT NULL, 
	CONSTRAINT pk_stage_events PRIMARY KEY (seq), 
	CONSTRAINT fk_stage_events_cycle_id FOREIGN KEY(cycle_id) REFERENCES cycles (id), 
	CONSTRAINT uq_stage_events_id UNIQUE (id)
);
INSERT INTO "stage_events" VALUES(1,'bf5847ec89e678a8aa2c83868d65d44701382cf00e124c0f293dbf5051c564bb','c1','collect','started',NULL,'2026-03-14 09:26:53.589793','{"episodes":2}');
CREATE TABLE targets (
	name VARCHAR NOT NULL, 
	paused_at DATETIME, 
	paused_by TEXT NOT NULL, 
	last_started_at DATETIME, 
	last_cause TEXT NOT NULL, asked_for TEXT DEFAULT '' NOT NULL, cannot_begin TEXT DEFAULT '' NOT NULL, 
	CONSTRAINT pk_targets PRIMARY KEY (name)
);
CREATE TABLE toolsets (
	hash VARCHAR NOT NULL, 
	tools JSON NOT NULL, 
	CONSTRAINT pk_toolsets PRIMARY KEY (hash)
);
INSERT INTO "toolsets" VALUES('a7be2e43c68c0fee64c2de252c2b65d3cf6a1c6e21a262bd0284ce81b072264f','[{"type":"function","function":{"name":"get_order","parameters":{"type":"object"},"description":"d"}}]');
CREATE TABLE training_iterations (
	run_id VARCHAR NOT NULL, 
	iteration INTEGER NOT NULL, 
	"values" JSON NOT NULL, 
	CONSTRAINT pk_training_iterations PRIMARY KEY (run_id, iteration), 
	CONSTRAINT fk_training_iterations_run_id FOREIGN KEY(run_id) REFERENCES training_runs (id)
);
INSERT INTO "training_iterations" VALUES('r1',0,'{"reward":0.3,"loss":null}');
CREATE TABLE training_runs (
	id VARCHAR NOT NULL, 
	cycle_id VARCHAR NOT NULL, 
	capability VARCHAR NOT NULL, 
	environment_hash VARCHAR NOT NULL, 
	model VARCHAR NOT NULL, 
	seed BIGINT NOT NULL, 
	config JSON NOT NULL, 
	state VARCHAR NOT NULL, 
	started_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	rollouts INTEGER NOT NULL, 
	detail TEXT NOT NULL, 
	CONSTRAINT pk_training_runs PRIMARY KEY (id), 
	CONSTRAINT fk_training_runs_cycle_id FOREIGN KEY(cycle_id) REFERENCES cycles (id), 
	CONSTRAINT fk_training_runs_environment_hash FOREIGN KEY(environment_hash) REFERENCES environments (hash)
);
INSERT INTO "training_runs" VALUES('r1','c1','date-reasoning','ad156ed4d50318e6a2858e1fd6e27f832a0de55ea2806978ba7de506307c036b','bundled',1099511627776,'{"lr":0.002}','finished','2026-03-14 09:26:57.589793','2026-03-14 09:26:58.589793',64,'');
CREATE TABLE trajectories (
	id VARCHAR NOT NULL, 
	digest VARCHAR NOT NULL, 
	source VARCHAR NOT NULL, 
	split VARCHAR NOT NULL, 
	task_id VARCHAR NOT NULL, 
	trial INTEGER NOT NULL, 
	model VARCHAR NOT NULL, 
	temperature FLOAT NOT NULL, 
	messages JSON NOT NULL, 
	toolset_hash VARCHAR NOT NULL, 
	reward FLOAT NOT NULL, 
	outcome VARCHAR NOT NULL, 
	end_cause VARCHAR NOT NULL, 
	parts JSON NOT NULL, 
	detail TEXT NOT NULL, 
	cycle_id VARCHAR, customer VARCHAR DEFAULT '' NOT NULL, started_at DATETIME, 
	CONSTRAINT pk_trajectories PRIMARY KEY (id), 
	CONSTRAINT fk_trajectories_cycle_id FOREIGN KEY(cycle_id) REFERENCES cycles (id), 
	CONSTRAINT fk_trajectories_toolset_hash FOREIGN KEY(toolset_hash) REFERENCES toolsets (hash)
);
INSERT INTO "trajectories" VALUES('t1','c4b61caac9f3763a04e61fcb838ec8976fbe48d0970d662a309069656f6815df','desk','train','41',0,'base',1.0,'[{"role":"system","content":"Be exact. \u2028 \ud800 \u0000"},{"role":"user","content":"I am t1"},{"role":"assistant","content":null,"tool_calls":[{"z":1,"a":2}]}]','a7be2e43c68c0fee64c2de252c2b65d3cf6a1c6e21a262bd0284ce81b072264f',0.25,'failure','done','{"state":0.5}','','c1','',NULL);
INSERT INTO "trajectories" VALUES('t2','241cad29a0f978c73e63e72c0ebe1e89772a44c0cbc899e3744bb3e41e927465','desk','train','41',1,'base',1.0,'[{"role":"system","content":"Be exact. \u2028 \ud800 \u0000"},{"role":"user","content":"I am t2"},{"role":"assistant","content":null,"tool_calls":[{"z":1,"a":2}]}]','a7be2e43c68c0fee64c2de252c2b65d3cf6a1c6e21a262bd0284ce81b072264f',1.0,'success','done','{"state":0.5}','','c1','',NULL);
INSERT INTO "trajectories" VALUES('t3','8e3141d6b25af8dcb29a74fc033bd9220fe384ef816c2fc3d4132a48c510c552','desk','test','41',0,'date-reasoning@v1',1.0,'[{"role":"system","content":"Be exact. \u2028 \ud800 \u0000"},{"role":"user","content":"I am t3"},{"role":"assistant","content":null,"tool_calls":[{"z":1,"a":2}]}]','a7be2e43c68c0fee64c2de252c2b65d3cf6a1c6e21a262bd0284ce81b072264f',1.0,'success','done','{"state":0.5}','','c1','',NULL);
CREATE TABLE trajectory_turns (
	trajectory_id VARCHAR NOT NULL, 
	turns INTEGER NOT NULL, 
	completion_tokens INTEGER NOT NULL, 
	packed BLOB NOT NULL, 
	CONSTRAINT pk_trajectory_turns PRIMARY KEY (trajectory_id), 
	CONSTRAINT fk_trajectory_turns_trajectory_id FOREIGN KEY(trajectory_id) REFERENCES trajectories (id)
);
INSERT INTO "trajectory_turns" VALUES('t1',1,2,X'78018B36D4898E36D2512A2EC92F50D231D031D631D2318A8D8DE5626460606002626620660162562086800BFBA75E537BC1AD27B80F0060D30B8E');
INSERT INTO "trajectory_turns" VALUES('t2',1,2,X'78018B36D4898E36D2512A2EC92F50D231D031D631D2318A8D8DE5626460606002626620660162562086800BFBA75E537BC1AD27B80F0060D30B8E');
INSERT INTO "trajectory_turns" VALUES('t3',1,2,X'78018B36D4898E36D2512A2EC92F50D231D031D631D2318A8D8DE5626460606002626620660162562086800BFBA75E537BC1AD27B80F0060D30B8E');
CREATE INDEX ix_admissions_environment_hash ON admissions (environment_hash);
CREATE INDEX ix_stage_events_cycle_id ON stage_events (cycle_id);
CREATE INDEX ix_training_runs_cycle_id ON training_runs (cycle_id);
CREATE INDEX ix_trajectories_listing ON trajectories (source, split, task_id, trial, model, id);
CREATE INDEX ix_adapters_cycle_id ON adapters (cycle_id);
CREATE INDEX ix_adapters_training_run_id ON adapters (training_run_id);
CREATE INDEX ix_labels_trajectory_id ON labels (trajectory_id);
CREATE INDEX ix_routing_choices_model ON routing_choices (model);
CREATE INDEX ix_gate_results_adapter ON gate_results (adapter);
CREATE INDEX ix_promotions_adapter ON promotions (adapter);
CREATE INDEX ix_approvals_adapter ON approvals (adapter);
CREATE INDEX ix_attempts_cycle_id ON attempts (cycle_id);
CREATE INDEX ix_parked_cycle_id ON parked (cycle_id);
CREATE INDEX ix_parked_input ON parked (stage, capability, input_hash);
CREATE INDEX ix_trajectories_reported ON trajectories (source, outcome) WHERE cycle_id IS NULL;
CREATE INDEX ix_conversations_model ON conversations (model);
CREATE INDEX ix_exchanges_open ON exchanges (settled_at, at);
CREATE INDEX ix_exchanges_conversation_id ON exchanges (conversation_id);
CREATE INDEX ix_exchanges_response_id ON exchanges (response_id);
CREATE INDEX ix_exchanges_trajectory_id ON exchanges (trajectory_id);
CREATE INDEX ix_feedback_conversation_id ON feedback (conversation_id);
CREATE INDEX ix_model_replies_spent ON model_replies (cycle_id, stage, capability, prompt_tokens, completion_tokens, estimated, cost, seconds);
CREATE INDEX ix_citations_trajectory_id ON citations (trajectory_id);
CREATE INDEX ix_faults_trajectory_id ON faults (trajectory_id);
CREATE INDEX ix_prompt_patches_capability ON prompt_patches (capability);
CREATE INDEX ix_conversation_positions_conversation_id ON conversation_positions (conversation_id);
CREATE INDEX ix_conversation_positions_at ON conversation_positions (at);
CREATE INDEX ix_responses_at ON responses (at);
CREATE INDEX ix_requests_at ON requests (at);
CREATE INDEX ix_trajectories_customers ON trajectories (source, customer) WHERE cycle_id IS NULL;
CREATE INDEX ix_trajectories_cycle_id ON trajectories (cycle_id) WHERE cycle_id IS NOT NULL;
CREATE INDEX ix_conversations_trial ON conversations (trial, at);
DELETE FROM "sqlite_sequence";
COMMIT;
