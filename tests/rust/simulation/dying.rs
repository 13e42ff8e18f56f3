//! Owners that die between two steps of a change's way. The next owner takes over, and repairs the inbox rows.

use std::{sync::Arc, time::Duration};

use chat_gateway::{
    chat::{Conversations, InboxWriter, Lease, Publish, Settings},
    memory::Memory,
    model::{Epoch, GatewayId},
    mutation::{Mutation, Step, die_after},
    store::simulated::Simulated,
    tasks::{Process, Tasks},
};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{
    Rules, World,
    rules::{
        ASKED_BY_NOBODY, CHANGES_NOTHING, INBOX_SHOWS, PAGE, REACTED, STORED, TEXT_LEFT, TOLD,
        UNREAD,
    },
    setting, simulate,
};
use crate::broken::{find, require};

/// Deaths of one run.
const DEATHS_MAX: usize = 4;
/// The time between two looks at whether an owner has died.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A gateway, which owns the conversation while its lease holds.
#[derive(Clone)]
pub(super) struct Gateway {
    pub id: GatewayId,
    pub conversations: Conversations,
    pub lease: Lease,
    pub process: Process,
}

impl Gateway {
    /// Opens a gateway that may own all conversations until its lease is ended.
    pub(super) fn open(
        number: usize,
        epoch: Epoch,
        store: Arc<Simulated>,
        publish: impl Publish,
        process: Process,
    ) -> Self {
        let tasks = Tasks::of(process.clone());
        let lease = Lease::unbounded(epoch);
        let settings = Settings {
            body_bytes_max: 1000,
            group_participants_max: 100,
            conversations_per_user_max: None,
            idle: Duration::from_secs(300),
            operation_timeout: Duration::from_millis(400),
            open_max: 10,
            memory: Memory::of_mib(64),
            page_bytes_max: 1 << 20,
            edit_window: None,
            reactions_coalesce: Duration::from_millis(250),
            consumers: None,
        };
        let inbox = Arc::new(InboxWriter::new(store.clone(), Memory::of_mib(64)));
        let flushing = inbox.clone();
        tasks.spawn(async move { flushing.run().await });
        let id = GatewayId(Uuid::from_u128(number as u128));
        let publish = Arc::new(publish);
        let conversations =
            Conversations::new(id, store, publish, inbox, lease.clone(), settings, tasks);
        Self {
            id,
            conversations,
            lease,
            process,
        }
    }
}

impl World {
    pub(super) fn newest(&self) -> Gateway {
        self.owners.lock().unwrap().last().unwrap().clone()
    }

    /// Waits. Returns earlier if the newest owner dies, and whether it has died.
    pub(super) async fn dies_within(&self, time: Duration) -> bool {
        let Rules::Dying(step, _) = self.rules else {
            sleep(time).await;
            return false;
        };
        let ends = Instant::now() + time;
        let mut armed = Some(Instant::now() + Duration::from_millis(self.random(300)));
        let newest = self.newest().process;
        while Instant::now() < ends && !newest.is_killed() {
            if armed.take_if(|at| *at <= Instant::now()).is_some() && self.deaths() < DEATHS_MAX {
                die_after(Some(step));
            }
            sleep(LOOK_EVERY).await;
        }
        newest.is_killed()
    }

    /// The number of gateways that have died.
    pub(super) fn deaths(&self) -> usize {
        let owners = self.owners.lock().unwrap();
        owners.iter().filter(|o| o.process.is_killed()).count()
    }

    /// Lets the newest owner repair what dead ones left. Returns false if it must be repeated.
    pub(super) async fn repair(&self) -> bool {
        let owners = self.owners.lock().unwrap().clone();
        let newest = &owners.last().unwrap().conversations;
        for dead in owners.iter().filter(|o| o.process.is_killed()) {
            if !newest.repair(dead.id).await.is_ok_and(|complete| complete) {
                return false;
            }
        }
        true
    }
}

#[test]
fn nothing_is_lost_when_an_owner_dies_after_any_step_of_a_change() {
    let (first, seeds) = (setting("FROM").unwrap_or(0), setting("SEEDS").unwrap_or(6));
    let mut failed = Vec::new();
    for step in Step::ALL {
        let mut deaths = 0;
        for seed in first..first + seeds {
            let run = simulate(seed, Rules::Dying(step, None));
            deaths += run.deaths;
            failed.extend(
                run.findings
                    .first()
                    .map(|f| format!("{step:?}, seed {seed}: {f}")),
            );
        }
        println!("{step:?}: {deaths} deaths in {seeds} seeds");
        assert!(deaths > 0, "no owner dies after {step:?}");
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

fn find_death(step: Step, rule: Mutation, seeds: u64, kinds: &[&str]) -> Result<(), String> {
    find((step, rule), 0..seeds, kinds, |seed, is_broken| {
        simulate(seed, Rules::Dying(step, is_broken.then_some(rule))).findings
    })
}

#[test]
fn a_takeover_that_does_not_apply_changes_again_is_found() {
    let steps = [
        Step::RowWritten,
        Step::Committed,
        Step::StatesWritten,
        Step::ReactorsWritten,
        Step::TakeoverSettled,
    ];
    let kinds = [
        STORED,
        REACTED,
        INBOX_SHOWS,
        UNREAD,
        TEXT_LEFT,
        PAGE,
        CHANGES_NOTHING,
    ];
    require(steps.map(|step| find_death(step, Mutation::ChangeReapply, 50, &kinds)));
}

#[test]
fn a_takeover_that_does_not_settle_changes_is_found() {
    let seeds = setting("SEEDS").unwrap_or(300);
    let (step, rule) = (Step::RowOnSomeReplicas, Mutation::ChangeSettle);
    let kinds = [ASKED_BY_NOBODY, TOLD, PAGE, STORED, " is not in the log"];
    require([find_death(step, rule, seeds, &kinds)]);
}
