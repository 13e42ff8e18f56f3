//! All statements of the store, prepared once.

use std::sync::Arc;

use metrics::{Counter, counter};
use scylla::{
    client::session::Session,
    errors::PrepareError,
    statement::{SerialConsistency, prepared::PreparedStatement},
};

use super::speculation::Profile;

/// A statement that writes a row of one table.
pub(super) struct Write {
    pub prepared: PreparedStatement,
    /// The rows of that table written since the start.
    pub rows: Counter,
}

/// The execution profiles of the statements, by kind.
pub(super) struct Profiles {
    pub reads: Profile,
    pub writes: Profile,
    /// Of what the lease of the gateway depends on.
    pub lease_reads: Profile,
    pub lease_writes: Profile,
    pub serial: SerialConsistency,
}

macro_rules! statements {
    (@type read) => { PreparedStatement };
    (@type lease_read) => { PreparedStatement };
    (@type lease_write) => { Arc<Write> };
    (@type transaction) => { PreparedStatement };
    (@type write) => { Arc<Write> };
    ($($(#[$doc:meta])* $kind:ident $name:ident: $text:expr,)+) => {
        pub(super) struct Statements {
            $($(#[$doc])* pub $name: statements!(@type $kind),)+
        }

        impl Statements {
            /// Prepares all statements.
            ///
            /// # Errors
            /// The driver's error if a table or column is missing, or the cluster does not answer.
            pub(super) async fn prepare(session: &Session, profiles: &Profiles) -> Result<Self, PrepareError> {
                let [$($name),+] = prepare_all(session, [$($text),+]).await?;
                Ok(Self {
                    $($name: $kind($name, profiles),)+
                })
            }
        }
    };
}

/// Prepares statements in a loop. An `await` for each of them makes a function that takes seconds to compile.
async fn prepare_all<const N: usize>(
    session: &Session,
    texts: [&str; N],
) -> Result<[PreparedStatement; N], PrepareError> {
    let mut prepared = Vec::with_capacity(N);
    for text in texts {
        prepared.push(session.prepare(text).await?);
    }
    let prepared = prepared.try_into();
    Ok(prepared.unwrap_or_else(|_| unreachable!("one for each text")))
}

fn read(statement: PreparedStatement, profiles: &Profiles) -> PreparedStatement {
    with_profile(statement, &profiles.reads)
}

fn write(statement: PreparedStatement, profiles: &Profiles) -> Arc<Write> {
    writing(with_profile(statement, &profiles.writes))
}

fn lease_read(statement: PreparedStatement, profiles: &Profiles) -> PreparedStatement {
    with_profile(statement, &profiles.lease_reads)
}

fn lease_write(statement: PreparedStatement, profiles: &Profiles) -> Arc<Write> {
    writing(with_profile(statement, &profiles.lease_writes))
}

/// Every statement but a transaction is idempotent: reads change nothing, and writes carry their seq as timestamp or write
/// rows that never change.
fn with_profile(mut statement: PreparedStatement, profile: &Profile) -> PreparedStatement {
    statement.set_is_idempotent(true);
    statement.set_execution_profile_handle(Some(profile.handle.clone()));
    statement.set_history_listener(profile.speculation.clone());
    statement
}

fn writing(statement: PreparedStatement) -> Arc<Write> {
    let table = statement.get_table_name().unwrap_or_default().to_owned();
    let rows = counter!("chat_store_rows_written_total", "table" => table);
    Arc::new(Write {
        prepared: statement,
        rows,
    })
}

/// Prepares a lightweight transaction. The driver never repeats it; after an unknown outcome the row is read back.
fn transaction(mut statement: PreparedStatement, profiles: &Profiles) -> PreparedStatement {
    statement.set_serial_consistency(Some(profiles.serial));
    statement
}

macro_rules! select_messages {
    () => {
        "SELECT seq, epoch, message_id, sender, client_id, kind, body, attachments, reply_to, at, settled, texts, \
         settle_end, content_state, reaction_state FROM messages WHERE conversation_id = ? AND bucket = ?"
    };
}

macro_rules! select_changes {
    () => {
        "SELECT rev, epoch, author, at, settled, change, settle_end FROM changes WHERE conversation_id = ? AND bucket = ?"
    };
}

statements! {
    write insert_message: "INSERT INTO messages (conversation_id, bucket, seq, epoch, message_id, sender, client_id, kind, body, \
        attachments, reply_to, at, settled, texts, settle_end) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP 0",
    /// The states of entries are in the same partition, so a page with its states is one read.
    read messages: concat!(select_messages!(), " AND seq >= ? AND seq <= ?"),
    /// All columns of it: read repair copies only those that are read, and a row that it copied in part is no row.
    read newest_message: concat!(select_messages!(), " LIMIT 1"),

    write set_content_state: "UPDATE messages USING TIMESTAMP ? SET content_state = ? \
        WHERE conversation_id = ? AND bucket = ? AND seq = ? AND epoch = 0",
    write set_reaction_state: "UPDATE messages USING TIMESTAMP ? SET reaction_state = ? \
        WHERE conversation_id = ? AND bucket = ? AND seq = ? AND epoch = 0",
    write erase_message: "UPDATE messages USING TIMESTAMP 1 SET body = ?, attachments = ? \
        WHERE conversation_id = ? AND bucket = ? AND seq = ? AND epoch = ?",

    write insert_change: "INSERT INTO changes (conversation_id, bucket, rev, epoch, author, at, settled, change, settle_end) \
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP 0",
    read changes: concat!(select_changes!(), " AND rev >= ? AND rev <= ?"),
    read newest_change: concat!(select_changes!(), " LIMIT 1"),
    write erase_change: "UPDATE changes USING TIMESTAMP 1 SET change = ? \
        WHERE conversation_id = ? AND bucket = ? AND rev = ? AND epoch = ?",

    write set_reactor: "UPDATE reactors USING TIMESTAMP ? SET active = ?, at = ?, rev = ? \
        WHERE conversation_id = ? AND seq = ? AND shard = ? AND emoji = ? AND user_id = ?",
    read reactors: "SELECT emoji, user_id, rev, active, at FROM reactors \
        WHERE conversation_id = ? AND seq = ? AND shard = ? AND (emoji, user_id) > (?, ?) LIMIT ?",
    read reactors_of_emoji: "SELECT emoji, user_id, rev, active, at FROM reactors \
        WHERE conversation_id = ? AND seq = ? AND shard = ? AND emoji = ? AND user_id > ? LIMIT ?",
    write set_user_reaction: "UPDATE user_reactions USING TIMESTAMP ? SET active = ? \
        WHERE conversation_id = ? AND bucket = ? AND user_id = ? AND seq = ? AND emoji = ?",
    read user_reactions: "SELECT seq, emoji, active FROM user_reactions \
        WHERE conversation_id = ? AND bucket = ? AND user_id = ? AND seq >= ? AND seq <= ?",

    write insert_erasure: "INSERT INTO erasures (day, shard, conversation_id, place, position, sender, client_id) \
        VALUES (?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP 0",
    /// Scans a table that has at most 256 partitions per day since the hint window.
    read erasure_partitions: "SELECT DISTINCT day, shard FROM erasures",
    read erasures: "SELECT conversation_id, place, position, sender, client_id FROM erasures WHERE day = ? AND shard = ?",
    /// Nothing is written to the partition of a day that is over.
    write delete_erasures: "DELETE FROM erasures USING TIMESTAMP 1 WHERE day = ? AND shard = ?",

    write insert_file: "INSERT INTO attachments (attachment_id, facts) VALUES (?, ?) USING TIMESTAMP 0",
    write set_file_result: "UPDATE attachments USING TIMESTAMP 3 SET result = ? WHERE attachment_id = ?",
    write erase_file: "UPDATE attachments USING TIMESTAMP 1 SET facts = ? WHERE attachment_id = ?",
    write set_file_state: "UPDATE attachments USING TIMESTAMP ? SET state = ? WHERE attachment_id = ?",
    read file: "SELECT facts, result, state FROM attachments WHERE attachment_id = ?",
    write set_reference: "UPDATE attachment_refs USING TIMESTAMP ? SET active = ?, rev = ? WHERE attachment_id = ? AND seq = ?",
    read references: "SELECT seq, active, rev FROM attachment_refs WHERE attachment_id = ? LIMIT ?",
    write insert_work: "INSERT INTO attachment_work (day, shard, attachment_id) VALUES (?, ?, ?) USING TIMESTAMP 0",
    read work: "SELECT attachment_id FROM attachment_work WHERE day = ? AND shard = ? AND attachment_id > ? LIMIT ?",
    read work_first: "SELECT attachment_id FROM attachment_work WHERE day = ? AND shard = ? LIMIT ?",
    /// Scans a table that has at most 64 partitions per day that is not finished.
    read work_shards: "SELECT DISTINCT day, shard FROM attachment_work",
    /// Nothing is written to the partition of a day that is over.
    write delete_work: "DELETE FROM attachment_work USING TIMESTAMP 1 WHERE day = ? AND shard = ?",
    write set_usage: "UPDATE attachment_usage USING TIMESTAMP ? SET bytes = ? WHERE user_id = ? AND day = ?",
    read usage: "SELECT bytes FROM attachment_usage WHERE user_id = ? AND day = ?",

    write set_offset_seq: "UPDATE consumer_offsets USING TIMESTAMP ? SET seq = ? WHERE conversation_id = ? AND consumer = ?",
    write set_offset_rev: "UPDATE consumer_offsets USING TIMESTAMP ? SET rev = ? WHERE conversation_id = ? AND consumer = ?",
    read offsets: "SELECT consumer, seq, rev FROM consumer_offsets WHERE conversation_id = ?",
    /// Only rows of replays are deleted, whose names are never used again.
    write delete_offset: "DELETE FROM consumer_offsets USING TIMESTAMP ? WHERE conversation_id = ? AND consumer = ?",
    write set_lagging_seq: "UPDATE consumer_lagging USING TIMESTAMP ? SET seq_at = ? \
        WHERE consumer = ? AND shard = ? AND conversation_id = ?",
    write set_lagging_rev: "UPDATE consumer_lagging USING TIMESTAMP ? SET rev_at = ? \
        WHERE consumer = ? AND shard = ? AND conversation_id = ?",
    write clear_lagging_seq: "DELETE seq_at FROM consumer_lagging USING TIMESTAMP ? \
        WHERE consumer = ? AND shard = ? AND conversation_id = ?",
    write clear_lagging_rev: "DELETE rev_at FROM consumer_lagging USING TIMESTAMP ? \
        WHERE consumer = ? AND shard = ? AND conversation_id = ?",
    write delete_lagging: "DELETE FROM consumer_lagging USING TIMESTAMP ? WHERE consumer = ? AND shard = ? AND conversation_id = ?",
    read lagging: "SELECT conversation_id, seq_at, rev_at, WRITETIME(seq_at), WRITETIME(rev_at) FROM consumer_lagging \
        WHERE consumer = ? AND shard = ? AND conversation_id > ? LIMIT ?",
    read lagging_first: "SELECT conversation_id, seq_at, rev_at, WRITETIME(seq_at), WRITETIME(rev_at) FROM consumer_lagging \
        WHERE consumer = ? AND shard = ? LIMIT ?",
    read lagging_row: "SELECT conversation_id, seq_at, rev_at, WRITETIME(seq_at), WRITETIME(rev_at) FROM consumer_lagging \
        WHERE consumer = ? AND shard = ? AND conversation_id = ?",
    write set_consumer: "UPDATE consumers USING TIMESTAMP ? SET state = ? WHERE name = ?",
    read consumer: "SELECT state, WRITETIME(state) FROM consumers WHERE name = ?",
    /// Scans a table that has one row per webhook and per replay.
    read consumers: "SELECT name, state, WRITETIME(state) FROM consumers",
    write insert_skipped: "INSERT INTO consumer_skipped (consumer, day, shard, conversation_id, place, position, status) \
        VALUES (?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP 0",
    /// Scans a table that has at most 256 partitions per consumer and day.
    read skipped_shards: "SELECT DISTINCT consumer, day, shard FROM consumer_skipped",
    read skipped: "SELECT conversation_id, place, position, status FROM consumer_skipped \
        WHERE consumer = ? AND day = ? AND shard = ? AND (conversation_id, place, position) > (?, ?, ?) LIMIT ?",
    read skipped_first: "SELECT conversation_id, place, position, status FROM consumer_skipped \
        WHERE consumer = ? AND day = ? AND shard = ? LIMIT ?",

    write set_devices: "UPDATE devices USING TIMESTAMP ? SET devices = ? WHERE user_id = ?",
    read devices: "SELECT devices, WRITETIME(devices) FROM devices WHERE user_id = ?",
    write set_device_token: "UPDATE device_tokens USING TIMESTAMP ? SET user_id = ?, device = ? WHERE hash = ?",
    read device_token: "SELECT user_id, device, WRITETIME(user_id) FROM device_tokens WHERE hash = ?",

    /// The time of the database is its timestamp, as time windows need it: one owner writes one value, however often.
    write insert_send: "INSERT INTO sends (conversation_id, sender, client_id, epoch, seq) VALUES (?, ?, ?, ?, ?)",
    read sends: "SELECT epoch, seq FROM sends WHERE conversation_id = ? AND sender = ? AND client_id = ?",

    write set_details: "UPDATE conversations USING TIMESTAMP ? SET kind = ?, name = ?, created_at = ?, created_by = ?, posting = ?, \
        public = ?, participant_count = ?, seq = ? WHERE conversation_id = ?",
    write set_head_bucket: "UPDATE conversations USING TIMESTAMP ? SET head_bucket = ? WHERE conversation_id = ?",
    write set_settled: "UPDATE conversations USING TIMESTAMP ? SET settled = ? WHERE conversation_id = ?",
    read conversation: "SELECT kind, name, created_at, created_by, posting, public, participant_count, seq \
        FROM conversations WHERE conversation_id = ?",
    read head: "SELECT head_bucket, settled, changes_head_bucket FROM conversations WHERE conversation_id = ?",
    write set_changes_head_bucket: "UPDATE conversations USING TIMESTAMP ? SET changes_head_bucket = ? WHERE conversation_id = ?",
    write set_changes_settled: "UPDATE conversations USING TIMESTAMP ? SET changes_settled = ? WHERE conversation_id = ?",
    write set_deleted: "UPDATE conversations USING TIMESTAMP ? SET deleted = ? WHERE conversation_id = ?",
    read changes_head: "SELECT changes_head_bucket, changes_settled, deleted FROM conversations WHERE conversation_id = ?",

    write set_membership: "UPDATE participants USING TIMESTAMP ? SET role = ?, joined_seq = ?, left_seq = ?, seq = ? \
        WHERE conversation_id = ? AND shard = ? AND user_id = ?",
    write set_participant_read: "UPDATE participants USING TIMESTAMP ? SET read_seq = ? \
        WHERE conversation_id = ? AND shard = ? AND user_id = ?",
    write set_participant_delivered: "UPDATE participants USING TIMESTAMP ? SET delivered_seq = ? \
        WHERE conversation_id = ? AND shard = ? AND user_id = ?",
    read participants: "SELECT user_id, role, joined_seq, left_seq, seq, delivered_seq, read_seq FROM participants \
        WHERE conversation_id = ? AND shard = ? AND user_id > ? LIMIT ?",
    read participant: "SELECT user_id, role, joined_seq, left_seq, seq, delivered_seq, read_seq FROM participants \
        WHERE conversation_id = ? AND shard = ? AND user_id = ?",

    write set_inbox_summary: "UPDATE user_conversations USING TIMESTAMP ? SET summary = ? WHERE user_id = ? AND conversation_id = ?",
    write set_inbox_read: "UPDATE user_conversations USING TIMESTAMP ? SET read_seq = ?, read_texts = ? \
        WHERE user_id = ? AND conversation_id = ?",
    write set_inbox_deleted: "UPDATE user_conversations USING TIMESTAMP ? SET deleted = ? WHERE user_id = ? AND conversation_id = ?",
    write set_inbox_rev: "UPDATE user_conversations USING TIMESTAMP ? SET rev = ? WHERE user_id = ? AND conversation_id = ?",
    write set_inbox_left: "UPDATE user_conversations USING TIMESTAMP ? SET left_seq = ? WHERE user_id = ? AND conversation_id = ?",
    write set_inbox_settings: "UPDATE user_conversations USING TIMESTAMP ? SET muted_until = ?, push = ? \
        WHERE user_id = ? AND conversation_id = ?",
    read inbox: "SELECT conversation_id, summary, read_seq, read_texts, left_seq, deleted, rev, muted_until, push, WRITETIME(push) AS settings_version \
        FROM user_conversations WHERE user_id = ?",
    read inbox_count: "SELECT conversation_id FROM user_conversations WHERE user_id = ? LIMIT ?",
    read inbox_rows: "SELECT conversation_id, summary, read_seq, read_texts, left_seq, deleted, rev, muted_until, push, WRITETIME(push) AS settings_version \
        FROM user_conversations WHERE user_id = ? AND conversation_id IN ?",

    write set_public: "UPDATE public_conversations USING TIMESTAMP ? SET public = ?, kind = ?, name = ?, created_at = ? \
        WHERE shard = ? AND conversation_id = ?",
    read public: "SELECT conversation_id, public, kind, name, created_at FROM public_conversations \
        WHERE shard = ? AND conversation_id > ? LIMIT ?",
    read public_first: "SELECT conversation_id, public, kind, name, created_at FROM public_conversations WHERE shard = ? LIMIT ?",

    write insert_activity: "INSERT INTO activity (gateway_id, minute, conversation_id) VALUES (?, ?, ?) USING TIMESTAMP 0",
    write insert_activity_minute: "INSERT INTO activity_minutes (gateway_id, minute) VALUES (?, ?) USING TIMESTAMP 0",
    read activity: "SELECT conversation_id FROM activity WHERE gateway_id = ? AND minute = ?",
    read activity_minutes: "SELECT minute FROM activity_minutes WHERE gateway_id = ?",
    read newest_activity_minutes: "SELECT minute FROM activity_minutes WHERE gateway_id = ? LIMIT ?",
    /// Scans a table that has one partition per gateway.
    read active_gateways: "SELECT DISTINCT gateway_id FROM activity_minutes",
    /// Its timestamp is above that of the inserts. A gateway's id is never used again.
    write delete_activity: "DELETE FROM activity USING TIMESTAMP 1 WHERE gateway_id = ? AND minute = ?",
    write delete_activity_minutes: "DELETE FROM activity_minutes USING TIMESTAMP 1 WHERE gateway_id = ?",

    write set_last_seen: "UPDATE users USING TIMESTAMP ? SET last_seen = ? WHERE user_id = ?",
    read last_seen: "SELECT last_seen FROM users WHERE user_id = ?",

    lease_write set_heartbeat: "UPDATE heartbeats USING TIMESTAMP ? SET address = ?, counter = ?, level = ? WHERE gateway_id = ?",
    lease_read heartbeat: "SELECT address, counter, level FROM heartbeats WHERE gateway_id = ?",

    lease_read ring: "SELECT version, members, change, level FROM ring WHERE name = 'ring'",
    transaction insert_ring: "INSERT INTO ring (name, version, members, change, level) VALUES ('ring', ?, ?, ?, ?) \
        IF NOT EXISTS",
    transaction update_ring: "UPDATE ring SET version = ?, members = ?, change = ?, level = ? WHERE name = 'ring' \
        IF version = ?",
}
