//! Simulates `tests/models/model.py` with the real owner: one conversation over three replicas that lose, delay and
//! resurrect writes, with owners that are deposed, clients that retry, and participants that come and go. The checker
//! sees only what clients see: an acknowledged message stays at its seq, once; every history is a prefix of one
//! sequence; in the end the participants are those of the log.
//!
//! Clients also edit, delete and react, as in `tests/models/model_changes.py`: an acknowledged change is in the log of
//! changes, once, in the order of time; pages, answers and events show states that the log has, and at least those
//! acknowledged before. In the end the stored states, reactions and inbox rows are those of the log, unread counts are
//! those counted by hand, and deleted texts are erased.
//!
//! Time is paused and every choice comes from the seed. A failing seed is printed, and `SEEDS=1 FROM=<seed>` replays
//! it. `SEEDS=2000 cargo test --release --test all simulation` runs more seeds.

mod changing;
mod checker;
mod dying;
mod files;
pub(crate) mod replay;
mod rows;
mod rules;
pub(crate) mod seen;

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use chat_gateway::{
    chat::{
        Audience, Body, Confirmation, Conversations, Creation, Guarantee, LogRange, Operation,
        Outcome, Page, Publication, Publish, RedeliveryGuard,
    },
    model::{
        ClientId, Content, ConversationId, Draft, Entry, Kind, Posting, Seq, SystemChange, UserId,
    },
    mutation::{Mutation, Step, break_rule, die_after},
    store::simulated::{Faults, Simulated},
    tasks::{Process, Tasks},
};
use checker::Checker;
use dying::Gateway;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use replay::Replay;
use rows::Whole;
use seen::{Seen, Told};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};
use uuid::Uuid;

use crate::paused::paused;

const CLIENTS: usize = 3;
const MESSAGES_EACH: usize = 25;
/// Users whom the host adds and removes.
const GUESTS: u64 = 4;
/// Additions and removals of one run.
const CHANGES: usize = 20;

/// Passes publications, which subscribers see, to the checker.
struct Watching {
    checker: Arc<Mutex<Checker>>,
    seen: Arc<Mutex<Seen>>,
    random: Mutex<StdRng>,
    tasks: Tasks,
}

impl Publish for Watching {
    fn publish(&self, publication: Publication) -> Confirmation {
        let confirmed = publication.guarantee == Guarantee::Confirmed;
        match (publication.body, publication.audience) {
            (Body::Entry(entry), _) => {
                let mut checker = self.checker.lock().unwrap();
                checker.saw(entry.seq, std::iter::once(&entry));
            }
            (Body::Changed(changed), _) => {
                let told = Told {
                    after: changed.after,
                    rev: publication.at.1,
                    items: changed.items.clone(),
                };
                self.seen.lock().unwrap().told.push(told);
            }
            (Body::Reacted(reacted), Audience::User(user)) => {
                let reacted = (user, reacted.as_ref().clone());
                self.seen.lock().unwrap().reacted.push(reacted);
            }
            _ => {}
        }
        self.confirm(confirmed)
    }
}

impl Watching {
    /// Confirms some publications later.
    fn confirm(&self, confirmed: bool) -> Confirmation {
        let draw = self.random.lock().unwrap().random_range(0..400);
        if !confirmed || draw >= 100 {
            return Confirmation::Immediate;
        }
        let (arrived, pending) = oneshot::channel();
        self.tasks.spawn(async move {
            sleep(Duration::from_millis(2 * draw)).await;
            drop(arrived.send(RedeliveryGuard(Arc::new(()))));
        });
        Confirmation::Pending(pending)
    }
}

struct World {
    conversation: ConversationId,
    store: Arc<Simulated>,
    checker: Arc<Mutex<Checker>>,
    seen: Arc<Mutex<Seen>>,
    /// The acknowledged messages, with their texts and senders.
    messages: Mutex<Vec<(Seq, String, UserId)>>,
    /// The longest time between two depositions, in ms. A takeover takes long while the replicas differ.
    tenure: u64,
    /// Whether clients change messages.
    changing: bool,
    /// Whether most messages are deleted at the end, and nothing is read before.
    purges: bool,
    /// All owners so far. The newest is the last.
    owners: Mutex<Vec<Gateway>>,
    random: Mutex<StdRng>,
    /// The newest epoch.
    epoch: AtomicU64,
    rules: Rules,
}

/// The rule that is broken on purpose, if any, which the checker must find.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rules {
    Kept,
    /// All are kept, and clients change no messages.
    KeptWithoutChanges,
    /// A lease that has ended is resumed under its old epoch.
    OldEpoch,
    Broken(Mutation),
    /// Owners die after a step of a change's way, and a rule may be broken.
    Dying(Step, Option<Mutation>),
}

impl Rules {
    /// Whether clients change messages. The rules of the log of messages are found sooner without that.
    fn with_changes(self) -> bool {
        match self {
            Self::Kept | Self::Dying(..) => true,
            Self::OldEpoch | Self::KeptWithoutChanges => false,
            Self::Broken(mutation) => !BROKEN_RULES_OF_THE_LOG.contains(&mutation),
        }
    }
}

impl World {
    fn random(&self, most: u64) -> u64 {
        self.random.lock().unwrap().random_range(0..=most)
    }

    fn new_owner(&self) {
        let process = Process::default();
        let mut owners = self.owners.lock().unwrap();
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        let watching = Watching {
            checker: self.checker.clone(),
            seen: self.seen.clone(),
            random: Mutex::new(StdRng::seed_from_u64(self.random(u64::MAX - 1))),
            tasks: Tasks::of(process.clone()),
        };
        let number = owners.len() + 1;
        let store = self.store.clone();
        let opened = Gateway::open(number, epoch, store, watching, process);
        owners.push(opened);
    }

    /// Mostly the newest owner, sometimes a deposed one that does not know it.
    fn some_owner(&self) -> Conversations {
        let back = if self.random(9) < 3 {
            self.random(2) as usize
        } else {
            0
        };
        let owners = self.owners.lock().unwrap();
        owners[owners.len().saturating_sub(1 + back)]
            .conversations
            .clone()
    }

    async fn client(self: Arc<Self>, name: usize) {
        let sender = user(name);
        let more = if self.purges { MESSAGES_EACH / 4 } else { 0 };
        for _ in 0..MESSAGES_EACH + more {
            self.say(&sender).await;
            sleep(Duration::from_millis(self.random(80))).await;
        }
    }

    /// Sends a message, and repeats it until it is acknowledged or given up.
    async fn say(&self, sender: &UserId) {
        let client_id = ClientId(Uuid::from_u128(self.random.lock().unwrap().random()));
        let text = self.marker();
        let mut retry = false;
        loop {
            let content = Content::text(&text);
            let draft = Draft {
                sender: sender.clone(),
                client_id,
                content,
                at: None,
                retry,
            };
            retry = true;
            if let Ok(sent) = self.some_owner().send(self.conversation, draft).await {
                self.checker
                    .lock()
                    .unwrap()
                    .acknowledge(client_id, sent.seq);
                let message = (sent.seq, text, sender.clone());
                self.messages.lock().unwrap().push(message);
                break;
            }
            sleep(Duration::from_millis(5 + self.random(60))).await;
            if self.random(19) == 0 {
                break; // The client gives up.
            }
        }
    }

    /// Adds guests and removes them again. The log decides which of these requests succeeded.
    async fn host(self: Arc<Self>) {
        for _ in 0..CHANGES {
            let guest = user(CLIENTS + self.random(GUESTS - 1) as usize);
            let operation = if self.random(1) == 0 {
                Operation::Add { user: guest }
            } else {
                Operation::Remove { user: guest }
            };
            let owner = self.some_owner();
            drop(owner.ask(self.conversation, user(0), operation).await);
            sleep(Duration::from_millis(self.random(150))).await;
        }
    }

    async fn reader(self: Arc<Self>) {
        loop {
            let owner = self.some_owner();
            let floor = self.seen.lock().unwrap().newest;
            if let Ok(page) = history(&owner, self.conversation).await {
                self.checker.lock().unwrap().saw(1, page.entries.iter());
                self.seen.lock().unwrap().page(floor, &page);
            }
            sleep(Duration::from_millis(10 + self.random(90))).await;
        }
    }

    /// Deposes owners. A lease ends, perhaps with writes in flight, and a new one begins on the same or another
    /// gateway.
    async fn ring(self: Arc<Self>) {
        loop {
            let tenure = Duration::from_millis(20 + self.random(self.tenure));
            let has_died = self.dies_within(tenure).await;
            let ends = Instant::now() + Duration::from_millis(self.random(120));
            self.newest().lease.end_at(ends);
            sleep(ends - Instant::now() + Duration::from_millis(1)).await;
            if self.random(2) > 0 || has_died {
                self.new_owner();
                self.repair().await;
                continue;
            }
            // The same gateway continues: it could not read the ring in time, and now it can.
            let lease = self.newest().lease;
            let epoch = match self.rules {
                Rules::OldEpoch => lease.epoch(),
                Rules::Kept | Rules::KeptWithoutChanges | Rules::Broken(_) | Rules::Dying(..) => {
                    self.epoch.fetch_add(1, Ordering::Relaxed) + 1
                }
            };
            lease.begin(epoch, Instant::now() + Duration::from_secs(3600), None);
        }
    }
}

fn user(name: usize) -> UserId {
    UserId::new(&format!("client-{name}")).unwrap()
}

async fn history(owner: &Conversations, conversation: ConversationId) -> Result<Page, String> {
    let operation = Operation::History {
        range: LogRange::After(0),
        limit: 1000,
    };
    match owner.ask(conversation, user(0), operation).await {
        Ok(Outcome::History(page)) => Ok(page),
        other => Err(format!("{other:?}")),
    }
}

/// The participants that an owner returns.
async fn participants(
    owner: &Conversations,
    conversation: ConversationId,
) -> Option<BTreeSet<UserId>> {
    let operation = Operation::Participants {
        after: None,
        limit: 100,
    };
    match owner.ask(conversation, user(0), operation).await {
        Ok(Outcome::Participants(page)) => Some(page.items.into_iter().map(|p| p.user).collect()),
        _ => None,
    }
}

/// The participants according to the log.
fn participants_of(entries: &[Arc<Entry>]) -> BTreeSet<UserId> {
    let mut present = BTreeSet::new();
    for entry in entries {
        match &entry.content {
            Content::System(SystemChange::Created { participants, .. }) => {
                present.extend(participants.iter().cloned());
            }
            Content::System(SystemChange::Added { user }) => drop(present.insert(user.clone())),
            Content::System(SystemChange::Removed { user }) => drop(present.remove(user)),
            _ => {}
        }
    }
    present
}

/// What one run found.
struct Found {
    findings: Vec<String>,
    acknowledged: usize,
    deaths: usize,
}

async fn run(seed: u64, rules: Rules) -> Found {
    let changing = rules.with_changes();
    let world = Arc::new(World {
        conversation: ConversationId(Uuid::from_u128(0x4000_8000_0000_0000_0000_0000)),
        store: Arc::new(Simulated::new(seed, Faults::BAD_DAY)),
        checker: Arc::default(),
        seen: Arc::default(),
        messages: Mutex::default(),
        tenure: match rules {
            _ if !changing => 380,
            _ => [1_000, 1_500, 2_000, 3_000][seed as usize % 4],
        },
        changing,
        purges: changing && seed % 8 == 7,
        owners: Mutex::default(),
        random: Mutex::new(StdRng::seed_from_u64(seed)),
        epoch: AtomicU64::new(0),
        rules,
    });
    let tasks = Tasks::default();
    world.new_owner();
    create(&world).await;
    let background = [
        tasks.spawn(world.clone().ring()),
        tasks.spawn(world.clone().reader()),
        tasks.spawn(world.clone().pages()),
        tasks.spawn(world.clone().look()),
    ];
    let mut clients: Vec<_> = (0..CLIENTS)
        .map(|c| tasks.spawn(world.clone().client(c)))
        .collect();
    clients.push(tasks.spawn(world.clone().host()));
    let devices = World::devices().into_iter().filter(|_| changing);
    clients.extend(devices.map(|device| tasks.spawn(world.clone().change(device))));
    for client in clients {
        client.await.unwrap();
    }
    if world.purges {
        world.purge().await;
    }
    if changing {
        world.say(&user(0)).await;
        world.change_newest().await;
    }
    background.iter().for_each(|task| task.abort());
    die_after(None);
    Found {
        findings: check(&world).await,
        acknowledged: world.checker.lock().unwrap().acknowledged.len(),
        deaths: world.deaths(),
    }
}

/// Compares everything that clients saw with what a last owner and the store have.
async fn check(world: &World) -> Vec<String> {
    let mut checker = std::mem::take(&mut *world.checker.lock().unwrap());
    let (whole, present) = match end(world).await {
        Ok(whole) => whole,
        Err(error) => {
            let finding = format!("the last owner does not serve: {error}");
            checker.findings.push(finding);
            return checker.findings;
        }
    };
    checker.end(&whole.entries, &present);
    let replayed = {
        let mut seen = world.seen.lock().unwrap();
        let mut replay = Replay::of(&whole.changes, &whole.entries);
        replay.check(&seen);
        checker.findings.append(&mut seen.findings);
        checker.findings.append(&mut replay.findings);
        replay
    };
    checker
        .findings
        .extend(world.check_stored(&whole, &replayed).await);
    world.checker.lock().unwrap().acknowledged = checker.acknowledged;
    checker.findings
}

/// Creates the group.
async fn create(world: &World) {
    loop {
        let creation = Creation {
            kind: Kind::Group,
            participants: (1..CLIENTS).map(user).collect(),
            name: None,
            public: false,
            posting: Posting::Everyone,
            at: None,
        };
        let created = world
            .some_owner()
            .ask(world.conversation, user(0), Operation::Create(creation))
            .await;
        if created.is_ok() {
            return;
        }
    }
}

/// Reads everything from a last owner, when nothing is in progress any more. It has 60 s to begin.
async fn end(world: &World) -> Result<(Whole, BTreeSet<UserId>), String> {
    /// Late writes land, and queued inbox rows are written.
    const QUIET: Duration = Duration::from_secs(6);
    world.newest().lease.end_at(Instant::now());
    world.new_owner();
    let last = world.newest().conversations;
    let begins = timeout(Duration::from_secs(60), async {
        while history(&last, world.conversation).await.is_err() {}
    });
    drop(begins.await);
    world.store.set_faults(Faults::NONE);
    while !world.repair().await {
        sleep(Duration::from_millis(5)).await;
    }
    sleep(QUIET).await;
    let whole = world.whole(&last).await?;
    let present = participants(&last, world.conversation).await;
    Ok((whole, present.ok_or("no participants")?))
}

/// A number from the environment.
fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn simulate(seed: u64, rules: Rules) -> Found {
    break_rule(match rules {
        Rules::Broken(mutation) => Some(mutation),
        Rules::Dying(_, broken) => broken,
        Rules::Kept | Rules::KeptWithoutChanges | Rules::OldEpoch => None,
    });
    let found = paused(seed, run(seed, rules));
    break_rule(None);
    found
}

const BROKEN_RULES_OF_THE_LOG: [Mutation; 4] = [
    Mutation::Lease,
    Mutation::Epoch,
    Mutation::Settle,
    Mutation::Apply,
];

#[test]
fn nothing_is_lost_duplicated_or_reordered_when_owners_change() {
    let first: u64 = setting("FROM").unwrap_or(0);
    let seeds: u64 = setting("SEEDS").unwrap_or(200);
    let (mut acknowledged, mut failed) = (0, Vec::new());
    for seed in first..first + seeds {
        let found = simulate(seed, Rules::Kept);
        acknowledged += found.acknowledged;
        if let Some(finding) = found.findings.first() {
            println!("seed {seed}: {:#?}", found.findings);
            failed.push(format!("seed {seed}: {finding}"));
        }
    }
    println!("{seeds} seeds, {acknowledged} acknowledged messages and changes");
    assert!(
        failed.is_empty(),
        "{} of {seeds} seeds fail: {:?}",
        failed.len(),
        &failed[..failed.len().min(5)]
    );
    assert!(
        acknowledged as u64 > seeds * 40,
        "too few messages were acknowledged: {acknowledged}"
    );
}
