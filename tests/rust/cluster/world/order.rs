//! The order of live events, as one session sees it.

use chat_gateway::model::Seq;

/// The newest entry of each conversation that a session knows, and whether it got one live. Its first live event may jump:
/// until a crash is repaired, the inbox of a session that connects may be older.
#[derive(Default)]
pub(super) struct Newest([(Seq, bool); 3]);

impl Newest {
    /// Notes an entry that the session learned of when it connected, by a page, or by a `resync`.
    pub(super) fn knows(&mut self, conversation: usize, seq: Seq) {
        let (newest, _) = &mut self.0[conversation];
        *newest = seq.max(*newest);
    }

    /// Notes the entry of a live event. If the event left out entries, this returns the newest one before it.
    pub(super) fn live(&mut self, conversation: usize, seq: Seq) -> Result<(), Seq> {
        let (before, is_known) = self.0[conversation];
        self.0[conversation] = (seq.max(before), true);
        if is_known && seq > before + 1 {
            return Err(before);
        }
        Ok(())
    }
}
