//! Simulates `tests/models/model.py` with the real owner: one conversation over three replicas that lose, delay and
//! resurrect writes, with owners that are deposed, clients that retry, and participants that come and go. The checker
//! sees only what clients see: an acknowledged message stays at its seq, once; every history is a prefix of one
//! sequence; in the end the participants are those of the log.
//!
//! Time is paused and every choice comes from the seed. A failing seed is printed, and `SEEDS=1 FROM=<seed>` replays
//! it. `SEEDS=2000 cargo test --release --test all simulation` runs more seeds.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use chat_gateway::{
    chat::{
        Body, Confirmation, Conversations, Creation, InboxWriter, Lease, LogRange, Operation,
        Outcome, Publication, Publish, Settings,
    },
    memory::Memory,
    model::{
        ClientId, Content, ConversationId, Draft, Entry, GatewayId, Kind, Posting, Seq,
        SystemChange, UserId,
    },
    mutation::{Mutation, break_rule},
    store::{
        Store,
        simulated::{Faults, Simulated},
    },
    tasks::Tasks,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

const CLIENTS: usize = 3;
const MESSAGES_EACH: usize = 25;
/// Users whom the host adds and removes.
const GUESTS: u64 = 4;
/// Additions and removals of one run.
const CHANGES: usize = 20;

/// What clients saw, and what was wrong with it.
#[derive(Default)]
struct Checker {
    acknowledged: HashMap<ClientId, Seq>,
    /// The sequence that every history must be a prefix of.
    canon: Vec<ClientId>,
    findings: Vec<String>,
}

impl Checker {
    fn acknowledge(&mut self, client: ClientId, seq: Seq) {
        let first = *self.acknowledged.entry(client).or_insert(seq);
        if first != seq {
            self.findings
                .push(format!("{client} acknowledged at {first} and at {seq}"));
        }
    }

    /// Checks the entries from `first` on that a reader or a subscriber saw.
    fn saw<'a>(&mut self, first: Seq, entries: impl Iterator<Item = &'a Arc<Entry>>) {
        for (seq, entry) in (first..).zip(entries) {
            if entry.seq != seq {
                self.findings
                    .push(format!("expected {seq}, saw {}", entry.seq));
                return;
            }
            let index = usize::try_from(seq - 1).unwrap();
            match self.canon.get(index) {
                Some(known) if *known != entry.client_id => {
                    self.findings
                        .push(format!("{seq} was {known}, now {}", entry.client_id));
                }
                Some(_) => {}
                None if index == self.canon.len() => self.canon.push(entry.client_id),
                // A live entry after a gap is compared once its predecessors have been read.
                None => {}
            }
        }
    }

    /// Checks the whole log, and the participants that its last owner returned.
    fn end(&mut self, entries: &[Arc<Entry>], present: &BTreeSet<UserId>) {
        self.saw(1, entries.iter());
        let expected = participants_of(entries);
        if *present != expected {
            let finding =
                format!("the owner says that {present:?} are in the group, the log {expected:?}");
            self.findings.push(finding);
        }
        let ids: Vec<ClientId> = entries.iter().map(|e| e.client_id).collect();
        if ids.iter().collect::<HashSet<_>>().len() != ids.len() {
            self.findings.push("a client id is in the log twice".into());
        }
        for (client, seq) in &self.acknowledged {
            let at = ids.get(usize::try_from(seq - 1).unwrap());
            if at != Some(client) {
                self.findings
                    .push(format!("{client} acknowledged at {seq}, found {at:?}"));
            }
        }
    }
}

/// Passes publications, which subscribers see, to the checker.
struct Watching(Arc<Mutex<Checker>>);

impl Publish for Watching {
    fn publish(&self, publication: Publication) -> Confirmation {
        if let Body::Entry(entry) = publication.body {
            self.0
                .lock()
                .unwrap()
                .saw(entry.seq, std::iter::once(&entry));
        }
        Confirmation::Immediate
    }
}

struct World {
    conversation: ConversationId,
    store: Arc<dyn Store>,
    checker: Arc<Mutex<Checker>>,
    /// All owners so far. The newest is the last.
    owners: Mutex<Vec<(Conversations, Lease)>>,
    random: Mutex<StdRng>,
    /// The newest epoch.
    epoch: AtomicU64,
    rules: Rules,
}

/// The rule that is broken on purpose, if any, which the checker must find.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rules {
    Kept,
    /// A lease that has ended is resumed under its old epoch.
    OldEpoch,
    Broken(Mutation),
}

impl World {
    fn random(&self, most: u64) -> u64 {
        self.random.lock().unwrap().random_range(0..=most)
    }

    fn new_owner(&self, tasks: &Tasks) {
        let mut owners = self.owners.lock().unwrap();
        let lease = Lease::unbounded(self.epoch.fetch_add(1, Ordering::Relaxed) + 1);
        let settings = Settings {
            body_bytes_max: 1000,
            group_participants_max: 100,
            idle: Duration::from_secs(300),
            operation_timeout: Duration::from_millis(400),
            open_max: 10,
            memory: Memory::of_mib(64),
            page_bytes_max: 1 << 20,
            edit_window: None,
            reactions_coalesce: Duration::from_millis(250),
            level: chat_gateway::model::CurrentLevel::of(chat_gateway::model::LEVEL_CHANGES),
        };
        let conversations = Conversations::new(
            GatewayId(Uuid::from_u128(owners.len() as u128 + 1)),
            self.store.clone(),
            Arc::new(Watching(self.checker.clone())),
            Arc::new(InboxWriter::new(self.store.clone(), Memory::of_mib(64))),
            lease.clone(),
            settings,
            tasks.clone(),
        );
        owners.push((conversations, lease));
    }

    /// Mostly the newest owner, sometimes a deposed one that does not know it.
    fn some_owner(&self) -> Conversations {
        let back = if self.random(9) < 3 {
            self.random(2) as usize
        } else {
            0
        };
        let owners = self.owners.lock().unwrap();
        owners[owners.len().saturating_sub(1 + back)].0.clone()
    }

    async fn client(self: Arc<Self>, name: usize) {
        let sender = user(name);
        for _ in 0..MESSAGES_EACH {
            let client_id = ClientId(Uuid::from_u128(self.random.lock().unwrap().random()));
            let mut retry = false;
            loop {
                let content = Content::text("x");
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
                    break;
                }
                sleep(Duration::from_millis(5 + self.random(60))).await;
                if self.random(19) == 0 {
                    break; // The client gives up.
                }
            }
            sleep(Duration::from_millis(self.random(80))).await;
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
            if let Some(entries) = history(&owner, self.conversation).await {
                self.checker.lock().unwrap().saw(1, entries.iter());
            }
            sleep(Duration::from_millis(10 + self.random(90))).await;
        }
    }

    /// Deposes owners. A lease ends, perhaps with writes in flight, and a new one begins on the same or another
    /// gateway.
    async fn ring(self: Arc<Self>, tasks: Tasks) {
        loop {
            sleep(Duration::from_millis(20 + self.random(380))).await;
            let ends = Instant::now() + Duration::from_millis(self.random(120));
            self.owners.lock().unwrap().last().unwrap().1.end_at(ends);
            sleep(ends - Instant::now() + Duration::from_millis(1)).await;
            if self.random(2) > 0 {
                self.new_owner(&tasks);
                continue;
            }
            // The same gateway continues: it could not read the ring in time, and now it can.
            let owners = self.owners.lock().unwrap();
            let lease = &owners.last().unwrap().1;
            let epoch = match self.rules {
                Rules::Kept | Rules::Broken(_) => self.epoch.fetch_add(1, Ordering::Relaxed) + 1,
                Rules::OldEpoch => lease.epoch(),
            };
            lease.begin(epoch, Instant::now() + Duration::from_secs(3600), None);
        }
    }
}

fn user(name: usize) -> UserId {
    UserId::new(&format!("client-{name}")).unwrap()
}

async fn history(owner: &Conversations, conversation: ConversationId) -> Option<Vec<Arc<Entry>>> {
    let operation = Operation::History {
        range: LogRange::After(0),
        limit: 1000,
    };
    match owner.ask(conversation, user(0), operation).await {
        Ok(Outcome::History(page)) => Some(page.entries),
        _ => None,
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

async fn run(seed: u64, rules: Rules) -> (Vec<String>, usize) {
    let world = Arc::new(World {
        conversation: ConversationId(Uuid::from_u128(0x4000_8000_0000_0000_0000_0000)),
        store: Arc::new(Simulated::new(seed, Faults::BAD_DAY)),
        checker: Arc::default(),
        owners: Mutex::default(),
        random: Mutex::new(StdRng::seed_from_u64(seed)),
        epoch: AtomicU64::new(0),
        rules,
    });
    let tasks = Tasks::default();
    world.new_owner(&tasks);
    create(&world).await;
    let ring = tasks.spawn(world.clone().ring(tasks.clone()));
    let reader = tasks.spawn(world.clone().reader());
    let mut clients: Vec<_> = (0..CLIENTS)
        .map(|c| tasks.spawn(world.clone().client(c)))
        .collect();
    clients.push(tasks.spawn(world.clone().host()));
    for client in clients {
        client.await.unwrap();
    }
    ring.abort();
    reader.abort();
    let whole = end(&world, &tasks).await;
    let mut checker = std::mem::take(&mut *world.checker.lock().unwrap());
    let Some((entries, present)) = whole else {
        checker
            .findings
            .push("the last owner did not serve within 60 s".into());
        return (checker.findings, 0);
    };
    checker.end(&entries, &present);
    (checker.findings, checker.acknowledged.len())
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

/// Reads the whole log and the participants from a last owner. `None` if it does not serve within 60 s.
async fn end(world: &World, tasks: &Tasks) -> Option<(Vec<Arc<Entry>>, BTreeSet<UserId>)> {
    world
        .owners
        .lock()
        .unwrap()
        .last()
        .unwrap()
        .1
        .end_at(Instant::now());
    world.new_owner(tasks);
    let last = world.owners.lock().unwrap().last().unwrap().0.clone();
    let whole = timeout(Duration::from_secs(60), async {
        loop {
            if let Some(entries) = history(&last, world.conversation).await
                && let Some(present) = participants(&last, world.conversation).await
            {
                break (entries, present);
            }
        }
    });
    whole.await.ok()
}

fn simulate(seed: u64, rules: Rules) -> (Vec<String>, usize) {
    break_rule(match rules {
        Rules::Broken(mutation) => Some(mutation),
        Rules::Kept | Rules::OldEpoch => None,
    });
    let found = simulate_as_is(seed, rules);
    break_rule(None);
    found
}

fn simulate_as_is(seed: u64, rules: Rules) -> (Vec<String>, usize) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(run(seed, rules))
}

#[test]
fn each_broken_rule_of_the_log_is_found() {
    for broken in [
        Mutation::Lease,
        Mutation::Epoch,
        Mutation::Settle,
        Mutation::Apply,
    ] {
        let found = (0..1_000).find(|&seed| !simulate(seed, Rules::Broken(broken)).0.is_empty());
        println!("broken rule {broken:?}: found at seed {found:?}");
        assert!(found.is_some(), "no seed finds the broken rule {broken:?}");
    }
}

#[test]
fn a_lease_resumed_under_its_old_epoch_is_found() {
    // About one seed of a few hundred finds it, and the order of some tasks differs from run to run.
    let found = (0..5_000).any(|seed| !simulate(seed, Rules::OldEpoch).0.is_empty());
    assert!(found, "no seed finds the resumed lease");
}

#[test]
fn nothing_is_lost_duplicated_or_reordered_when_owners_change() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let first: u64 = number("FROM").unwrap_or(0);
    let seeds: u64 = number("SEEDS").unwrap_or(200);
    let (mut acknowledged, mut failed) = (0, Vec::new());
    for seed in first..first + seeds {
        let (findings, messages) = simulate(seed, Rules::Kept);
        acknowledged += messages;
        if let Some(finding) = findings.into_iter().next() {
            failed.push(format!("seed {seed}: {finding}"));
        }
    }
    println!("{seeds} seeds, {acknowledged} acknowledged messages");
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
