COMMENT ON SCHEMA public IS 'standard public schema';
CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.architecture_graphs (
    architecture character varying(200) NOT NULL,
    input_size integer NOT NULL,
    graph_hash character varying(64),
    refusal text,
    CONSTRAINT ck_architecture_graphs_graph_or_refusal CHECK (((graph_hash IS NULL) <> (refusal IS NULL)))
);
CREATE TABLE public.assignment_labels (
    assignment_id character varying(32) NOT NULL,
    label_id bigint NOT NULL
);
CREATE TABLE public.assignments (
    id character varying(32) NOT NULL,
    campaign_id character varying(16) NOT NULL,
    round_number integer NOT NULL,
    configuration_id character varying(20) NOT NULL,
    device_key character varying(64) NOT NULL,
    role character varying(16) NOT NULL,
    rank integer NOT NULL,
    reason jsonb NOT NULL,
    state character varying(16) NOT NULL,
    attempts integer NOT NULL,
    failures integer NOT NULL,
    worker character varying(200),
    CONSTRAINT ck_assignments_assignmentstate CHECK (((state)::text = ANY ((ARRAY['open'::character varying, 'leased'::character varying, 'done'::character varying, 'failed'::character varying])::text[]))),
    CONSTRAINT ck_assignments_attempts CHECK (((failures >= 0) AND (failures <= attempts))),
    CONSTRAINT ck_assignments_role CHECK (((role)::text = ANY ((ARRAY['train'::character varying, 'evaluate'::character varying])::text[]))),
    CONSTRAINT ck_assignments_worker CHECK (((worker IS NOT NULL) = ((state)::text = 'leased'::text)))
);
CREATE TABLE public.campaign_pool (
    campaign_id character varying(16) NOT NULL,
    configuration_id character varying(20) NOT NULL,
    held_out boolean NOT NULL
);
CREATE TABLE public.campaigns (
    id character varying(16) NOT NULL,
    name character varying(200) NOT NULL,
    spec jsonb NOT NULL,
    seed bigint NOT NULL,
    state character varying(16) NOT NULL,
    created_at timestamp with time zone NOT NULL,
    finished_at timestamp with time zone,
    owner_id character varying(32),
    owner_process jsonb,
    owned_since timestamp with time zone,
    owner_seen_at timestamp with time zone,
    CONSTRAINT ck_campaigns_campaignstate CHECK (((state)::text = ANY ((ARRAY['running'::character varying, 'paused'::character varying, 'finished'::character varying, 'failed'::character varying, 'cancelled'::character varying])::text[]))),
    CONSTRAINT ck_campaigns_finished_at CHECK (((finished_at IS NOT NULL) = ((state)::text = ANY ((ARRAY['finished'::character varying, 'cancelled'::character varying])::text[])))),
    CONSTRAINT ck_campaigns_owner CHECK ((((owner_id IS NULL) = (owner_process IS NULL)) AND ((owner_id IS NULL) = (owned_since IS NULL)) AND ((owner_id IS NULL) = (owner_seen_at IS NULL))))
);
CREATE TABLE public.canaries (
    id bigint NOT NULL,
    attempt_key character varying(64) NOT NULL,
    taken_at timestamp with time zone NOT NULL,
    host character varying(255) NOT NULL,
    device character varying(64) NOT NULL,
    stack_fingerprint character varying(64) NOT NULL,
    configuration_id character varying(20) NOT NULL,
    protocol character varying(64) NOT NULL,
    campaign_id character varying(16),
    outcome character varying(16) NOT NULL,
    step_time_ms double precision,
    memory_mib double precision,
    power_w double precision,
    reference_ms double precision,
    relative_drift double precision,
    decision character varying(16) NOT NULL,
    message text,
    CONSTRAINT ck_canaries_canarydecision CHECK (((decision)::text = ANY ((ARRAY['ok'::character varying, 'drifting'::character varying, 'stop'::character varying])::text[]))),
    CONSTRAINT ck_canaries_memory_mib_positive CHECK ((memory_mib > (0)::double precision)),
    CONSTRAINT ck_canaries_message CHECK (((message IS NULL) = ((decision)::text = 'ok'::text))),
    CONSTRAINT ck_canaries_outcome CHECK (((outcome)::text = ANY ((ARRAY['ok'::character varying, 'oom'::character varying, 'timeout'::character varying, 'unsupported'::character varying, 'unstable'::character varying, 'error'::character varying])::text[]))),
    CONSTRAINT ck_canaries_power_w_positive CHECK ((power_w > (0)::double precision)),
    CONSTRAINT ck_canaries_reference_ms_positive CHECK ((reference_ms > (0)::double precision)),
    CONSTRAINT ck_canaries_step_time CHECK (((step_time_ms IS NULL) OR ((outcome)::text = 'ok'::text))),
    CONSTRAINT ck_canaries_step_time_ms_positive CHECK ((step_time_ms > (0)::double precision))
);
CREATE SEQUENCE public.canaries_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.canaries_id_seq OWNED BY public.canaries.id;
CREATE TABLE public.configurations (
    id character varying(20) NOT NULL,
    architecture character varying(200) NOT NULL,
    family character varying(64) NOT NULL,
    batch_size integer NOT NULL,
    input_size integer NOT NULL,
    "precision" character varying(16) NOT NULL,
    memory_format character varying(16) NOT NULL,
    optimizer character varying(16) NOT NULL,
    phase character varying(16) NOT NULL,
    CONSTRAINT ck_configurations_batch_size_positive CHECK ((batch_size > 0)),
    CONSTRAINT ck_configurations_input_size_positive CHECK ((input_size > 0))
);
CREATE TABLE public.devices (
    id integer NOT NULL,
    key character varying(64) NOT NULL,
    fingerprint character varying(64) NOT NULL,
    environment jsonb NOT NULL
);
CREATE SEQUENCE public.devices_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.devices_id_seq OWNED BY public.devices.id;
CREATE TABLE public.events (
    id bigint NOT NULL,
    campaign_id character varying(16) NOT NULL,
    at timestamp with time zone NOT NULL,
    kind character varying(64) NOT NULL,
    message jsonb NOT NULL
);
CREATE SEQUENCE public.events_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.events_id_seq OWNED BY public.events.id;
CREATE TABLE public.graphs (
    content_hash character varying(64) NOT NULL,
    template bytea NOT NULL,
    node_count integer NOT NULL,
    CONSTRAINT ck_graphs_node_count_positive CHECK ((node_count > 0))
);
CREATE TABLE public.labels (
    id bigint NOT NULL,
    configuration_id character varying(20) NOT NULL,
    device_id integer NOT NULL,
    protocol_name character varying(64) NOT NULL,
    measurement_id bigint NOT NULL,
    provenance character varying(16) NOT NULL,
    step_time_ms double precision,
    memory_mib double precision,
    power_w double precision,
    energy_j double precision,
    created_at timestamp with time zone NOT NULL,
    memory_above_mib double precision,
    outcome character varying(16) NOT NULL,
    CONSTRAINT ck_labels_energy_j_positive CHECK ((energy_j > (0)::double precision)),
    CONSTRAINT ck_labels_memory_above_mib_positive CHECK ((memory_above_mib > (0)::double precision)),
    CONSTRAINT ck_labels_memory_mib_positive CHECK ((memory_mib > (0)::double precision)),
    CONSTRAINT ck_labels_ok_or_censored CHECK (((((outcome)::text = 'ok'::text) AND (memory_above_mib IS NULL)) OR (((outcome)::text = 'oom'::text) AND (memory_above_mib IS NOT NULL)))),
    CONSTRAINT ck_labels_outcome CHECK (((outcome)::text = ANY ((ARRAY['ok'::character varying, 'oom'::character varying, 'timeout'::character varying, 'unsupported'::character varying, 'unstable'::character varying, 'error'::character varying])::text[]))),
    CONSTRAINT ck_labels_power_w_positive CHECK ((power_w > (0)::double precision)),
    CONSTRAINT ck_labels_provenance CHECK (((provenance)::text = ANY ((ARRAY['measured'::character varying, 'imported'::character varying, 'simulated'::character varying])::text[]))),
    CONSTRAINT ck_labels_some_metric CHECK (((step_time_ms IS NOT NULL) OR (memory_mib IS NOT NULL) OR (power_w IS NOT NULL) OR (memory_above_mib IS NOT NULL))),
    CONSTRAINT ck_labels_step_time_ms_positive CHECK ((step_time_ms > (0)::double precision)),
    CONSTRAINT ck_labels_value_or_bound CHECK (((memory_mib IS NULL) OR (memory_above_mib IS NULL)))
);
CREATE SEQUENCE public.labels_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.labels_id_seq OWNED BY public.labels.id;
CREATE TABLE public.measurements (
    id bigint NOT NULL,
    attempt_key character varying(64) NOT NULL,
    configuration_id character varying(20) NOT NULL,
    device_id integer NOT NULL,
    protocol_name character varying(64) NOT NULL,
    protocol jsonb NOT NULL,
    campaign_id character varying(16),
    assignment_id character varying(32),
    provenance character varying(16) NOT NULL,
    outcome character varying(16) NOT NULL,
    failed_in character varying(16),
    message text,
    started_at timestamp with time zone NOT NULL,
    duration_s double precision NOT NULL,
    step_samples_ms bytea NOT NULL,
    step_median_ms double precision,
    step_mean_ms double precision,
    step_iqr_ms double precision,
    step_p95_ms double precision,
    memory_mib double precision,
    power_w double precision,
    energy_j double precision,
    memory_detail_mib jsonb NOT NULL,
    missing jsonb NOT NULL,
    environment jsonb NOT NULL,
    step_forward_share double precision,
    step_backward_share double precision,
    step_optimizer_share double precision,
    CONSTRAINT ck_measurements_duration_s CHECK ((duration_s >= (0)::double precision)),
    CONSTRAINT ck_measurements_energy_j_positive CHECK ((energy_j > (0)::double precision)),
    CONSTRAINT ck_measurements_memory_mib_positive CHECK ((memory_mib > (0)::double precision)),
    CONSTRAINT ck_measurements_outcome CHECK (((outcome)::text = ANY ((ARRAY['ok'::character varying, 'oom'::character varying, 'timeout'::character varying, 'unsupported'::character varying, 'unstable'::character varying, 'error'::character varying])::text[]))),
    CONSTRAINT ck_measurements_power_w_positive CHECK ((power_w > (0)::double precision)),
    CONSTRAINT ck_measurements_provenance CHECK (((provenance)::text = ANY ((ARRAY['measured'::character varying, 'imported'::character varying, 'simulated'::character varying])::text[]))),
    CONSTRAINT ck_measurements_step_iqr_ms CHECK ((step_iqr_ms >= (0)::double precision)),
    CONSTRAINT ck_measurements_step_mean_ms_positive CHECK ((step_mean_ms > (0)::double precision)),
    CONSTRAINT ck_measurements_step_median_ms_positive CHECK ((step_median_ms > (0)::double precision)),
    CONSTRAINT ck_measurements_step_p95_ms_positive CHECK ((step_p95_ms > (0)::double precision)),
    CONSTRAINT ck_measurements_step_summary CHECK ((((step_median_ms IS NULL) = (step_mean_ms IS NULL)) AND ((step_median_ms IS NULL) = (step_iqr_ms IS NULL)) AND ((step_median_ms IS NULL) = (step_p95_ms IS NULL))))
);
CREATE SEQUENCE public.measurements_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.measurements_id_seq OWNED BY public.measurements.id;
CREATE TABLE public.pool_members (
    pool_id integer NOT NULL,
    configuration_id character varying(20) NOT NULL
);
CREATE TABLE public.pools (
    id integer NOT NULL,
    name character varying(64) NOT NULL,
    spec jsonb NOT NULL,
    built_at timestamp with time zone NOT NULL
);
CREATE SEQUENCE public.pools_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.pools_id_seq OWNED BY public.pools.id;
CREATE TABLE public.rounds (
    campaign_id character varying(16) NOT NULL,
    number integer NOT NULL,
    purpose character varying(16) NOT NULL,
    state character varying(16) NOT NULL,
    report jsonb,
    CONSTRAINT ck_rounds_number CHECK ((number >= 0)),
    CONSTRAINT ck_rounds_purpose CHECK (((purpose)::text = ANY ((ARRAY['evaluation'::character varying, 'initial'::character varying, 'acquired'::character varying])::text[]))),
    CONSTRAINT ck_rounds_report CHECK (((report IS NOT NULL) = ((state)::text = 'closed'::text))),
    CONSTRAINT ck_rounds_roundstate CHECK (((state)::text = ANY ((ARRAY['open'::character varying, 'closed'::character varying])::text[])))
);
CREATE TABLE public.snapshots (
    id character varying(64) NOT NULL,
    campaign_id character varying(16),
    location character varying(1000) NOT NULL,
    manifest jsonb NOT NULL,
    created_at timestamp with time zone NOT NULL
);
CREATE TABLE public.step_profiles (
    architecture character varying(200) NOT NULL,
    input_size integer NOT NULL,
    profile bytea,
    saved_bytes_constant bigint,
    saved_bytes_per_sample bigint,
    trainable_parameters bigint,
    frozen_parameters bigint,
    refusal text,
    trace_version integer DEFAULT 1 NOT NULL,
    CONSTRAINT ck_step_profiles_frozen_parameters CHECK (((frozen_parameters IS NULL) = (profile IS NULL))),
    CONSTRAINT ck_step_profiles_profile_or_refusal CHECK (((profile IS NULL) <> (refusal IS NULL))),
    CONSTRAINT ck_step_profiles_saved_bytes_constant CHECK (((saved_bytes_constant IS NULL) = (profile IS NULL))),
    CONSTRAINT ck_step_profiles_saved_bytes_per_sample CHECK (((saved_bytes_per_sample IS NULL) = (profile IS NULL))),
    CONSTRAINT ck_step_profiles_trainable_parameters CHECK (((trainable_parameters IS NULL) = (profile IS NULL)))
);
ALTER TABLE ONLY public.canaries ALTER COLUMN id SET DEFAULT nextval('public.canaries_id_seq'::regclass);
ALTER TABLE ONLY public.devices ALTER COLUMN id SET DEFAULT nextval('public.devices_id_seq'::regclass);
ALTER TABLE ONLY public.events ALTER COLUMN id SET DEFAULT nextval('public.events_id_seq'::regclass);
ALTER TABLE ONLY public.labels ALTER COLUMN id SET DEFAULT nextval('public.labels_id_seq'::regclass);
ALTER TABLE ONLY public.measurements ALTER COLUMN id SET DEFAULT nextval('public.measurements_id_seq'::regclass);
ALTER TABLE ONLY public.pools ALTER COLUMN id SET DEFAULT nextval('public.pools_id_seq'::regclass);
INSERT INTO public.alembic_version VALUES ('0011');
INSERT INTO public.architecture_graphs VALUES ('resnet18', 64, '91f3b9dbf855fb45a35ad724f89f6cfba185f4d34b5b95ad0018259551b5029c', NULL);
INSERT INTO public.architecture_graphs VALUES ('odd', 64, NULL, 'no graph');
INSERT INTO public.assignment_labels VALUES ('a60055b3d8a0412aa861f9d230f7b75c', 1);
INSERT INTO public.assignment_labels VALUES ('d417135f1a1743ee9e72f84de1286e95', 2);
INSERT INTO public.assignment_labels VALUES ('a17814ffd519452981229c608c633e47', 3);
INSERT INTO public.assignments VALUES ('a60055b3d8a0412aa861f9d230f7b75c', '24c1d8c5', 0, '0039b0dfddc571874466', 'cpu-2t', 'evaluate', 0, '{"score": 0.5}', 'done', 1, 0, NULL);
INSERT INTO public.assignments VALUES ('d417135f1a1743ee9e72f84de1286e95', '24c1d8c5', 1, 'b95230515aa9df061193', 'cpu-2t', 'train', 0, '{"score": 0.5}', 'done', 1, 0, NULL);
INSERT INTO public.assignments VALUES ('a17814ffd519452981229c608c633e47', '24c1d8c5', 1, '52ddbfc82d56465b7834', 'cpu-2t', 'train', 1, '{"score": 0.5}', 'done', 1, 0, NULL);
INSERT INTO public.assignments VALUES ('34a04ec018d445408cee14af471f845f', '24c1d8c5', 1, '083e34d663c523058f6f', 'cpu-2t', 'train', 2, '{"score": 0.5}', 'done', 1, 0, NULL);
INSERT INTO public.assignments VALUES ('3b5972ae38e641e3b12d8e20679f4fd2', '24c1d8c5', 1, '4b0510117e92499d7369', 'cpu-2t', 'train', 3, '{"score": 0.5}', 'leased', 1, 0, 'w');
INSERT INTO public.campaign_pool VALUES ('24c1d8c5', 'b95230515aa9df061193', false);
INSERT INTO public.campaign_pool VALUES ('24c1d8c5', '52ddbfc82d56465b7834', false);
INSERT INTO public.campaign_pool VALUES ('24c1d8c5', '083e34d663c523058f6f', false);
INSERT INTO public.campaign_pool VALUES ('24c1d8c5', '4b0510117e92499d7369', false);
INSERT INTO public.campaign_pool VALUES ('24c1d8c5', '982935b9e7ea902a2600', false);
INSERT INTO public.campaign_pool VALUES ('24c1d8c5', '0039b0dfddc571874466', true);
INSERT INTO public.campaigns VALUES ('24c1d8c5', 'tiny', '{"budget": 3}', 7, 'running', '2026-11-23 07:00:21.603679+00', NULL, 'o', '{"pid": 1, "host": "o", "began": 1, "machine": "machine of o"}', '2026-11-23 07:00:21.816622+00', '2999-01-01 00:00:00+00');
INSERT INTO public.canaries VALUES (1, 'canary', '2026-01-02 03:04:05+00', 'here', 'cpu-2t', 'f', 'b95230515aa9df061193', 'quick', '24c1d8c5', 'ok', 12, 300, NULL, NULL, NULL, 'ok', NULL);
INSERT INTO public.configurations VALUES ('b95230515aa9df061193', 'resnet18', 'resnet', 1, 64, 'fp32', 'contiguous', 'sgd', 'train');
INSERT INTO public.configurations VALUES ('52ddbfc82d56465b7834', 'resnet18', 'resnet', 2, 64, 'fp32', 'contiguous', 'sgd', 'train');
INSERT INTO public.configurations VALUES ('083e34d663c523058f6f', 'resnet18', 'resnet', 3, 64, 'fp32', 'contiguous', 'sgd', 'train');
INSERT INTO public.configurations VALUES ('4b0510117e92499d7369', 'resnet18', 'resnet', 4, 64, 'fp32', 'contiguous', 'sgd', 'train');
INSERT INTO public.configurations VALUES ('982935b9e7ea902a2600', 'resnet18', 'resnet', 5, 64, 'fp32', 'contiguous', 'sgd', 'train');
INSERT INTO public.configurations VALUES ('0039b0dfddc571874466', 'vgg11', 'vgg', 1, 64, 'fp32', 'contiguous', 'sgd', 'train');
INSERT INTO public.devices VALUES (1, 'cpu-2t', '0d64e2ab4acf1362', '{"host": "here", "torch": "2.13.0", "device": "cpu-2t", "load_average_before": 0.25}');
INSERT INTO public.devices VALUES (2, 'cpu-2t', 'fe901c90e5f7f29c', '{"device": "cpu-2t", "device_name": "a CPU", "measuring_version": 2}');
INSERT INTO public.events VALUES (1, '24c1d8c5', '2026-11-23 07:00:21.778444+00', 'note', '{"message": "hello"}');
INSERT INTO public.graphs VALUES ('91f3b9dbf855fb45a35ad724f89f6cfba185f4d34b5b95ad0018259551b5029c', '\x504b03042d00000008000000210084256161ffffffffffffffff0e001400766f636162756c6172792e6e707901001000900000000000000050000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e136aa2aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a863a9a3a0ab50a14002e670606867c20ce03e232200600504b03042d0000000800000021001e31094bffffffffffffffff0d0014006f70657261746f72732e6e707901001000880000000000000047000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a2aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a463a9a3a0ab50a14002e06280000504b03042d000000080000002100b3d7bcd4ffffffffffffffff130014007369676e61747572655f74657874732e6e707901001000800000000000000044000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e136aa8aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a063a9a3a0ab50a14002e00504b03042d0000000800000021003b065547ffffffffffffffff0e0014007369676e6174757265732e6e707901001000800000000000000044000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a2aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a063a9a3a0ab50a14002e00504b03042d000000080000002100b3d7bcd4ffffffffffffffff0e001400736c6f745f74657874732e6e707901001000800000000000000044000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e136aa8aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a063a9a3a0ab50a14002e00504b03042d0000000800000021003b065547ffffffffffffffff0e001400656467655f736c6f74732e6e707901001000800000000000000044000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a2aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a063a9a3a0ab50a14002e00504b03042d000000080000002100bb2a8ff6ffffffffffffffff0900140065646765732e6e70790100100090000000000000004b000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a863a0a469a3a0ab50a64032e06286084d200504b03042d000000080000002100effb9367ffffffffffffffff0e001400706172616d65746572732e6e707901001000900000000000000049000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a463a9a3a0ab50a14002e46060880d100504b03042d0000000800000021003ab13566ffffffffffffffff1400140066697865645f62617463685f73697a652e6e707901001000880000000000000045000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a9a3a0ab50a14012e06280000504b03042d000000080000002100e43ef26fffffffffffffffff19001400636f6e7374616e742e696e7075745f7368617065732e6e707901001000e0000000000000004c000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a463a0a669a3a0ab50a64032e460608a0150d00504b03042d000000080000002100e43ef26fffffffffffffffff1a001400636f6e7374616e742e6f75747075745f7368617065732e6e707901001000e0000000000000004c000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a463a0a669a3a0ab50a64032e460608a0150d00504b03042d00000008000000210004cc2260ffffffffffffffff11001400636f6e7374616e742e6d6163732e6e707901001000900000000000000049000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a463a9a3a0ab50a14002e2e060880d100504b03042d000000080000002100effb9367ffffffffffffffff19001400636f6e7374616e742e6d656d6f72795f62797465732e6e707901001000900000000000000049000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a463a9a3a0ab50a14002e46060880d100504b03042d000000080000002100e43ef26fffffffffffffffff16001400736c6f70652e696e7075745f7368617065732e6e707901001000e0000000000000004c000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a463a0a669a3a0ab50a64032e460608a0150d00504b03042d000000080000002100e43ef26fffffffffffffffff17001400736c6f70652e6f75747075745f7368617065732e6e707901001000e0000000000000004c000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a463a0a669a3a0ab50a64032e460608a0150d00504b03042d00000008000000210004cc2260ffffffffffffffff0e001400736c6f70652e6d6163732e6e707901001000900000000000000049000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a463a9a3a0ab50a14002e2e060880d100504b03042d000000080000002100effb9367ffffffffffffffff16001400736c6f70652e6d656d6f72795f62797465732e6e707901001000900000000000000049000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a463a9a3a0ab50a14002e46060880d100504b01022d032d0000000800000021008425616150000000900000000e0000000000000000000000800100000000766f636162756c6172792e6e7079504b01022d032d0000000800000021001e31094b47000000880000000d00000000000000000000008001900000006f70657261746f72732e6e7079504b01022d032d000000080000002100b3d7bcd444000000800000001300000000000000000000008001160100007369676e61747572655f74657874732e6e7079504b01022d032d0000000800000021003b06554744000000800000000e000000000000000000000080019f0100007369676e6174757265732e6e7079504b01022d032d000000080000002100b3d7bcd444000000800000000e0000000000000000000000800123020000736c6f745f74657874732e6e7079504b01022d032d0000000800000021003b06554744000000800000000e00000000000000000000008001a7020000656467655f736c6f74732e6e7079504b01022d032d000000080000002100bb2a8ff64b0000009000000009000000000000000000000080012b03000065646765732e6e7079504b01022d032d000000080000002100effb936749000000900000000e00000000000000000000008001b1030000706172616d65746572732e6e7079504b01022d032d0000000800000021003ab13566450000008800000014000000000000000000000080013a04000066697865645f62617463685f73697a652e6e7079504b01022d032d000000080000002100e43ef26f4c000000e00000001900000000000000000000008001c5040000636f6e7374616e742e696e7075745f7368617065732e6e7079504b01022d032d000000080000002100e43ef26f4c000000e00000001a000000000000000000000080015c050000636f6e7374616e742e6f75747075745f7368617065732e6e7079504b01022d032d00000008000000210004cc226049000000900000001100000000000000000000008001f4050000636f6e7374616e742e6d6163732e6e7079504b01022d032d000000080000002100effb93674900000090000000190000000000000000000000800180060000636f6e7374616e742e6d656d6f72795f62797465732e6e7079504b01022d032d000000080000002100e43ef26f4c000000e0000000160000000000000000000000800114070000736c6f70652e696e7075745f7368617065732e6e7079504b01022d032d000000080000002100e43ef26f4c000000e00000001700000000000000000000008001a8070000736c6f70652e6f75747075745f7368617065732e6e7079504b01022d032d00000008000000210004cc226049000000900000000e000000000000000000000080013d080000736c6f70652e6d6163732e6e7079504b01022d032d000000080000002100effb936749000000900000001600000000000000000000008001c6080000736c6f70652e6d656d6f72795f62797465732e6e7079504b050600000000110011003f040000570900000000', 2);
INSERT INTO public.labels VALUES (1, '0039b0dfddc571874466', 1, 'quick', 1, 'measured', 12.5, 321.5, NULL, NULL, '2026-11-23 07:00:21.675664+00', NULL, 'ok');
INSERT INTO public.labels VALUES (2, 'b95230515aa9df061193', 1, 'quick', 2, 'measured', 12.5, 321.5, 50, NULL, '2026-11-23 07:00:21.725433+00', NULL, 'ok');
INSERT INTO public.labels VALUES (3, '52ddbfc82d56465b7834', 1, 'quick', 3, 'measured', NULL, NULL, NULL, NULL, '2026-11-23 07:00:21.741537+00', 4096, 'oom');
INSERT INTO public.measurements VALUES (1, 'a60055b3d8a0412aa861f9d230f7b75c-1', '0039b0dfddc571874466', 1, 'quick', '{"name": "quick", "max_steps": 50, "min_steps": 50, "timeout_s": 300.0, "max_seconds": 60.0, "warmup_steps": 5, "power_window_s": 2.0, "unstable_lost_share": 0.1, "target_relative_error": 0.0, "unstable_relative_iqr": 0.25}', '24c1d8c5', 'a60055b3d8a0412aa861f9d230f7b75c', 'measured', 'ok', NULL, NULL, '2026-01-02 03:04:05.678901+00', 3.25, '\x000040410000484100005441', 12.5, 12.6, 0.5, 13.5, 321.5, NULL, NULL, '{"peak": 321.5}', '{"power_w": "no meter", "energy_j": "no meter"}', '{"host": "here", "torch": "2.13.0", "device": "cpu-2t", "load_average_before": 0.25}', NULL, NULL, NULL);
INSERT INTO public.measurements VALUES (2, 'd417135f1a1743ee9e72f84de1286e95-1', 'b95230515aa9df061193', 1, 'quick', '{"name": "quick", "max_steps": 50, "min_steps": 50, "timeout_s": 300.0, "max_seconds": 60.0, "warmup_steps": 5, "power_window_s": 2.0, "unstable_lost_share": 0.1, "target_relative_error": 0.0, "unstable_relative_iqr": 0.25}', '24c1d8c5', 'd417135f1a1743ee9e72f84de1286e95', 'measured', 'ok', NULL, NULL, '2026-01-02 03:04:05.678901+00', 3.25, '\x000040410000484100005441', 12.5, 12.6, 0.5, 13.5, 321.5, 50, NULL, '{"peak": 321.5}', '{"power_w": "no meter", "energy_j": "no meter"}', '{"host": "here", "torch": "2.13.0", "device": "cpu-2t", "load_average_before": 0.25}', NULL, NULL, NULL);
INSERT INTO public.measurements VALUES (3, 'a17814ffd519452981229c608c633e47-1', '52ddbfc82d56465b7834', 1, 'quick', '{"name": "quick", "max_steps": 50, "min_steps": 50, "timeout_s": 300.0, "max_seconds": 60.0, "warmup_steps": 5, "power_window_s": 2.0, "unstable_lost_share": 0.1, "target_relative_error": 0.0, "unstable_relative_iqr": 0.25}', '24c1d8c5', 'a17814ffd519452981229c608c633e47', 'measured', 'oom', 'measure', 'ended as oom', '2026-01-02 03:04:05.678901+00', 3.25, '\x', NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"capacity": 4096.0}', '{"power_w": "no meter", "energy_j": "no meter"}', '{"host": "here", "torch": "2.13.0", "device": "cpu-2t", "load_average_before": 0.25}', NULL, NULL, NULL);
INSERT INTO public.measurements VALUES (4, '34a04ec018d445408cee14af471f845f-1', '083e34d663c523058f6f', 1, 'quick', '{"name": "quick", "max_steps": 50, "min_steps": 50, "timeout_s": 300.0, "max_seconds": 60.0, "warmup_steps": 5, "power_window_s": 2.0, "unstable_lost_share": 0.1, "target_relative_error": 0.0, "unstable_relative_iqr": 0.25}', '24c1d8c5', '34a04ec018d445408cee14af471f845f', 'measured', 'unsupported', 'measure', 'ended as unsupported', '2026-01-02 03:04:05.678901+00', 3.25, '\x', NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{}', '{"power_w": "no meter", "energy_j": "no meter"}', '{"host": "here", "torch": "2.13.0", "device": "cpu-2t", "load_average_before": 0.25}', NULL, NULL, NULL);
INSERT INTO public.pool_members VALUES (1, 'b95230515aa9df061193');
INSERT INTO public.pool_members VALUES (1, '52ddbfc82d56465b7834');
INSERT INTO public.pool_members VALUES (1, '083e34d663c523058f6f');
INSERT INTO public.pool_members VALUES (1, '4b0510117e92499d7369');
INSERT INTO public.pool_members VALUES (1, '982935b9e7ea902a2600');
INSERT INTO public.pools VALUES (1, 'tiny', '{"name": "tiny"}', '2026-11-23 07:00:21.590555+00');
INSERT INTO public.rounds VALUES ('24c1d8c5', 0, 'evaluation', 'closed', '{"error": 0.5}');
INSERT INTO public.rounds VALUES ('24c1d8c5', 1, 'initial', 'open', NULL);
INSERT INTO public.snapshots VALUES ('s1', '24c1d8c5', 'there', '{}', '2026-01-01 00:00:00+00');
INSERT INTO public.step_profiles VALUES ('resnet18', 64, '\x504b03042d00000008000000210094abc098ffffffffffffffff090014006b696e64732e6e707901001000830000000000000047000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a05e9369a8aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91ac63a9a3a0ab50a14002e06664600504b03042d00000008000000210017241ecfffffffffffffffff0a001400626c6f636b732e6e7079010010008c0000000000000047000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a2aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91ac63a9a3a0ab50a14002e06240000504b03042d000000080000002100098f3b0cffffffffffffffff0900140073697a65732e6e707901001000b00000000000000050000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91ac63a0a469a3a0ab50a64032e06260608e060c00ed0e401504b03042d0000000800000021003b065547ffffffffffffffff0d0014006772616469656e74732e6e707901001000800000000000000044000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a2aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a063a9a3a0ab50a14002e00504b03042d0000000800000021001491c934ffffffffffffffff13001400706172616d657465725f62797465732e6e707901001000880000000000000049000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a863a9a3a0ab50a14002e064606300000504b03042d000000080000002100c09567c8ffffffffffffffff100014006275666665725f62797465732e6e707901001000800000000000000044000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a063a9a3a0ab50a14002e00504b03042d0000000800000021004befb31affffffffffffffff0b0014006e756d626572732e6e707901001000b0000000000000005a000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a663a9a3a0ab50a14002e0e06085080d20c0250fa13ab162388deb3209591010100504b01022d032d00000008000000210094abc09847000000830000000900000000000000000000008001000000006b696e64732e6e7079504b01022d032d00000008000000210017241ecf470000008c0000000a0000000000000000000000800182000000626c6f636b732e6e7079504b01022d032d000000080000002100098f3b0c50000000b000000009000000000000000000000080010501000073697a65732e6e7079504b01022d032d0000000800000021003b06554744000000800000000d00000000000000000000008001900100006772616469656e74732e6e7079504b01022d032d0000000800000021001491c9344900000088000000130000000000000000000000800113020000706172616d657465725f62797465732e6e7079504b01022d032d000000080000002100c09567c844000000800000001000000000000000000000008001a10200006275666665725f62797465732e6e7079504b01022d032d0000000800000021004befb31a5a000000b00000000b00000000000000000000008001270300006e756d626572732e6e7079504b0506000000000700070099010000be0300000000', 4096, 5000000000, 6000000000, 0, NULL, 2);
SELECT pg_catalog.setval('public.canaries_id_seq', 1, false);
SELECT pg_catalog.setval('public.devices_id_seq', 1, false);
SELECT pg_catalog.setval('public.events_id_seq', 1, false);
SELECT pg_catalog.setval('public.labels_id_seq', 1, false);
SELECT pg_catalog.setval('public.measurements_id_seq', 1, false);
SELECT pg_catalog.setval('public.pools_id_seq', 1, false);
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.architecture_graphs
    ADD CONSTRAINT pk_architecture_graphs PRIMARY KEY (architecture, input_size);
ALTER TABLE ONLY public.assignment_labels
    ADD CONSTRAINT pk_assignment_labels PRIMARY KEY (assignment_id);
ALTER TABLE ONLY public.assignments
    ADD CONSTRAINT pk_assignments PRIMARY KEY (id);
ALTER TABLE ONLY public.campaign_pool
    ADD CONSTRAINT pk_campaign_pool PRIMARY KEY (campaign_id, configuration_id);
ALTER TABLE ONLY public.campaigns
    ADD CONSTRAINT pk_campaigns PRIMARY KEY (id);
ALTER TABLE ONLY public.canaries
    ADD CONSTRAINT pk_canaries PRIMARY KEY (id);
ALTER TABLE ONLY public.configurations
    ADD CONSTRAINT pk_configurations PRIMARY KEY (id);
ALTER TABLE ONLY public.devices
    ADD CONSTRAINT pk_devices PRIMARY KEY (id);
ALTER TABLE ONLY public.events
    ADD CONSTRAINT pk_events PRIMARY KEY (id);
ALTER TABLE ONLY public.graphs
    ADD CONSTRAINT pk_graphs PRIMARY KEY (content_hash);
ALTER TABLE ONLY public.labels
    ADD CONSTRAINT pk_labels PRIMARY KEY (id);
ALTER TABLE ONLY public.measurements
    ADD CONSTRAINT pk_measurements PRIMARY KEY (id);
ALTER TABLE ONLY public.pool_members
    ADD CONSTRAINT pk_pool_members PRIMARY KEY (pool_id, configuration_id);
ALTER TABLE ONLY public.pools
    ADD CONSTRAINT pk_pools PRIMARY KEY (id);
ALTER TABLE ONLY public.rounds
    ADD CONSTRAINT pk_rounds PRIMARY KEY (campaign_id, number);
ALTER TABLE ONLY public.snapshots
    ADD CONSTRAINT pk_snapshots PRIMARY KEY (id);
ALTER TABLE ONLY public.step_profiles
    ADD CONSTRAINT pk_step_profiles PRIMARY KEY (architecture, input_size);
ALTER TABLE ONLY public.assignments
    ADD CONSTRAINT uq_assignments_campaign_id_configuration_id_device_key UNIQUE (campaign_id, configuration_id, device_key);
ALTER TABLE ONLY public.canaries
    ADD CONSTRAINT uq_canaries_attempt_key UNIQUE (attempt_key);
ALTER TABLE ONLY public.devices
    ADD CONSTRAINT uq_devices_key_fingerprint UNIQUE (key, fingerprint);
ALTER TABLE ONLY public.labels
    ADD CONSTRAINT uq_labels_configuration_id_device_id_protocol_name UNIQUE (configuration_id, device_id, protocol_name);
ALTER TABLE ONLY public.labels
    ADD CONSTRAINT uq_labels_measurement_id UNIQUE (measurement_id);
ALTER TABLE ONLY public.measurements
    ADD CONSTRAINT uq_measurements_attempt_key UNIQUE (attempt_key);
ALTER TABLE ONLY public.pools
    ADD CONSTRAINT uq_pools_name UNIQUE (name);
CREATE INDEX ix_architecture_graphs_graph_hash ON public.architecture_graphs USING btree (graph_hash);
CREATE INDEX ix_assignment_labels_label_id ON public.assignment_labels USING btree (label_id);
CREATE INDEX ix_assignments_campaign_id_device_key_state_round_number_rank ON public.assignments USING btree (campaign_id, device_key, state, round_number, rank);
CREATE INDEX ix_canaries_campaign_id ON public.canaries USING btree (campaign_id);
CREATE INDEX ix_canaries_device_stack_fingerprint_host_taken_at ON public.canaries USING btree (device, stack_fingerprint, host, taken_at);
CREATE INDEX ix_configurations_architecture ON public.configurations USING btree (architecture);
CREATE INDEX ix_configurations_family_architecture_batch_size_input_size ON public.configurations USING btree (family, architecture, batch_size, input_size);
CREATE INDEX ix_events_campaign_id ON public.events USING btree (campaign_id);
CREATE INDEX ix_graphs_node_count ON public.graphs USING btree (node_count);
CREATE INDEX ix_labels_created_at ON public.labels USING btree (created_at);
CREATE INDEX ix_labels_device_id ON public.labels USING btree (device_id);
CREATE INDEX ix_measurements_assignment_id ON public.measurements USING btree (assignment_id);
CREATE INDEX ix_measurements_campaign_id ON public.measurements USING btree (campaign_id);
CREATE INDEX ix_measurements_configuration_id_device_id ON public.measurements USING btree (configuration_id, device_id);
CREATE UNIQUE INDEX ix_measurements_outcome_id ON public.measurements USING btree (outcome, id);
CREATE INDEX ix_measurements_started_at ON public.measurements USING btree (started_at);
CREATE INDEX ix_snapshots_campaign_id ON public.snapshots USING btree (campaign_id);
ALTER TABLE ONLY public.architecture_graphs
    ADD CONSTRAINT fk_architecture_graphs_graph_hash FOREIGN KEY (graph_hash) REFERENCES public.graphs(content_hash);
ALTER TABLE ONLY public.assignment_labels
    ADD CONSTRAINT fk_assignment_labels_assignment_id FOREIGN KEY (assignment_id) REFERENCES public.assignments(id);
ALTER TABLE ONLY public.assignment_labels
    ADD CONSTRAINT fk_assignment_labels_label_id FOREIGN KEY (label_id) REFERENCES public.labels(id);
ALTER TABLE ONLY public.assignments
    ADD CONSTRAINT fk_assignments_campaign_id_configuration_id FOREIGN KEY (campaign_id, configuration_id) REFERENCES public.campaign_pool(campaign_id, configuration_id);
ALTER TABLE ONLY public.assignments
    ADD CONSTRAINT fk_assignments_campaign_id_round_number FOREIGN KEY (campaign_id, round_number) REFERENCES public.rounds(campaign_id, number);
ALTER TABLE ONLY public.campaign_pool
    ADD CONSTRAINT fk_campaign_pool_campaign_id FOREIGN KEY (campaign_id) REFERENCES public.campaigns(id);
ALTER TABLE ONLY public.campaign_pool
    ADD CONSTRAINT fk_campaign_pool_configuration_id FOREIGN KEY (configuration_id) REFERENCES public.configurations(id);
ALTER TABLE ONLY public.canaries
    ADD CONSTRAINT fk_canaries_campaign_id FOREIGN KEY (campaign_id) REFERENCES public.campaigns(id);
ALTER TABLE ONLY public.canaries
    ADD CONSTRAINT fk_canaries_configuration_id FOREIGN KEY (configuration_id) REFERENCES public.configurations(id);
ALTER TABLE ONLY public.events
    ADD CONSTRAINT fk_events_campaign_id FOREIGN KEY (campaign_id) REFERENCES public.campaigns(id);
ALTER TABLE ONLY public.labels
    ADD CONSTRAINT fk_labels_configuration_id FOREIGN KEY (configuration_id) REFERENCES public.configurations(id);
ALTER TABLE ONLY public.labels
    ADD CONSTRAINT fk_labels_device_id FOREIGN KEY (device_id) REFERENCES public.devices(id);
ALTER TABLE ONLY public.labels
    ADD CONSTRAINT fk_labels_measurement_id FOREIGN KEY (measurement_id, outcome) REFERENCES public.measurements(id, outcome);
ALTER TABLE ONLY public.measurements
    ADD CONSTRAINT fk_measurements_assignment_id FOREIGN KEY (assignment_id) REFERENCES public.assignments(id);
ALTER TABLE ONLY public.measurements
    ADD CONSTRAINT fk_measurements_campaign_id FOREIGN KEY (campaign_id) REFERENCES public.campaigns(id);
ALTER TABLE ONLY public.measurements
    ADD CONSTRAINT fk_measurements_configuration_id FOREIGN KEY (configuration_id) REFERENCES public.configurations(id);
ALTER TABLE ONLY public.measurements
    ADD CONSTRAINT fk_measurements_device_id FOREIGN KEY (device_id) REFERENCES public.devices(id);
ALTER TABLE ONLY public.pool_members
    ADD CONSTRAINT fk_pool_members_configuration_id FOREIGN KEY (configuration_id) REFERENCES public.configurations(id);
ALTER TABLE ONLY public.pool_members
    ADD CONSTRAINT fk_pool_members_pool_id FOREIGN KEY (pool_id) REFERENCES public.pools(id);
ALTER TABLE ONLY public.rounds
    ADD CONSTRAINT fk_rounds_campaign_id FOREIGN KEY (campaign_id) REFERENCES public.campaigns(id);
ALTER TABLE ONLY public.snapshots
    ADD CONSTRAINT fk_snapshots_campaign_id FOREIGN KEY (campaign_id) REFERENCES public.campaigns(id);
