//! The ring: its members, the lease of each, and what the ring names them for. The rules are in `view.rs` and
//! `membership.rs`, which have no I/O.

pub(super) mod finalize;
pub(super) mod members;
pub(super) mod membership;
pub(super) mod raise;
pub(super) mod status;
pub(super) mod view;
pub(super) mod view_changes;
