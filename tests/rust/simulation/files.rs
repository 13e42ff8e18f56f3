//! Uploaded files of one conversation over three replicas, whose owners change, pause and die, and whose last writes may
//! arrive when others own it. Users upload, send, drop and give up files; every gateway erases and sweeps, with the code of
//! the product. Bytes are in a simulated directory or a simulated bucket, to which a gateway may write days after it began to
//! look at a file. The checker knows only what users see: a message that is acknowledged keeps its files until somebody takes
//! them from it, a message names no file without bytes, and in the end no bytes are left that no message names.

mod bytes;
mod users;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use chat_gateway::{
    chat::{
        CheckFile, Confirmation, Conversations, Creation, Error, FileUse, LogRange, Operation,
        Outcome, Page, Publication, Publish,
    },
    clock,
    gateway::{Dropped, Eraser, Erasing, FileBytes},
    model::{
        AttachmentId, ClientId, ConversationId, FileFacts, FileState, Kind, Millis, Posting, Seq,
        UserId,
    },
    mutation::{Mutation, break_rule},
    store::{
        FileStore as _, Store, WorkShard,
        simulated::{Faults, Reach, Simulated},
    },
    tasks::{Process, Tasks},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{
    sync::{Notify, oneshot},
    time::{Instant, sleep, timeout},
};
use uuid::Uuid;

use super::{dying::Gateway, setting, user};
use crate::{
    broken::{find, require},
    paused::paused,
};
use bytes::Bytes;

const USERS: usize = 3;
/// Times in which users are active. A long quiet time may follow each.
const ROUNDS: usize = 6;
const ACTIVE: Duration = Duration::from_secs(25);
/// What is dropped is erased two days later at most, and in a bucket again two days after that.
const SWEPT_WITHIN_DAYS: usize = 5;
/// The time in which a gateway sweeps once or twice.
const QUIET: Duration = Duration::from_secs(400);
/// The age at which a file is erased that no message has.
const ORPHAN_MS: Millis = 3_600_000;
/// The time after which a user repeats a request that is not answered.
const PATIENCE: Duration = Duration::from_secs(2);

/// Many writes are lost, or arrive after both checks of a file.
const WORSE_DAY: Faults = Faults {
    lost: 20,
    late: 25,
    late_ms: 8_000,
    ..Faults::BAD_DAY
};
/// The time for which a gateway asks the same one, although another may be the owner by now.
const FOLLOWS: Duration = Duration::from_secs(4);

// What is found.
const WITHOUT_BYTES: &str = " without bytes";
const LEFT: &str = " has bytes, and no message names it";

/// A gateway with its eraser.
#[derive(Clone)]
struct Site {
    gateway: Gateway,
    tasks: Tasks,
    eraser: Eraser,
    store: Arc<Simulated>,
}

/// A message as its sender knows it.
struct Sent {
    sender: UserId,
    seq: Seq,
    /// The files that nobody has taken from it, or tried to.
    required: BTreeSet<AttachmentId>,
}

struct World {
    conversation: ConversationId,
    store: Arc<Simulated>,
    bytes: Arc<Bytes>,
    sites: Mutex<Vec<Site>>,
    epoch: AtomicU64,
    is_active: AtomicBool,
    /// Everyone goes on. A `watch` would wake them in another order in each run.
    resumed: Notify,
    /// A message is being sent, and its owner is to die.
    sending: Notify,
    /// Whether owners change seldom, and users do little, so that what an owner left stays the newest for long.
    lonely: bool,
    /// The acknowledged messages.
    sent: Mutex<BTreeMap<ClientId, Sent>>,
    uploads: Mutex<Vec<AttachmentId>>,
    findings: Mutex<Vec<String>>,
    random: Mutex<StdRng>,
}

/// Passes dropped files to the eraser of the same gateway.
struct Dropping(Eraser);

impl Publish for Dropping {
    fn publish(&self, _: Publication) -> Confirmation {
        Confirmation::Immediate
    }

    fn drop_file(&self, conversation: ConversationId, file: AttachmentId) {
        self.0.drop_file(conversation, file);
    }
}

/// What the eraser of a gateway works with.
struct Place {
    world: Arc<World>,
    store: Arc<Simulated>,
    number: usize,
    /// The gateway that it takes for the owner, and since when.
    owner: Mutex<(Instant, Site)>,
}

impl Place {
    fn owner(&self) -> Site {
        let mut owner = self.owner.lock().unwrap();
        if owner.0.elapsed() > FOLLOWS {
            *owner = (Instant::now(), self.world.some());
        }
        owner.1.clone()
    }
}

#[async_trait]
impl Erasing for Place {
    fn store(&self) -> &dyn Store {
        &*self.store
    }

    fn bytes(&self) -> &dyn FileBytes {
        &*self.world.bytes
    }

    fn orphan_ms(&self) -> Millis {
        ORPHAN_MS
    }

    fn sweeps(&self, _: WorkShard) -> bool {
        // The newest, and perhaps one that does not know that it is not.
        self.number + 2 >= self.world.sites.lock().unwrap().len()
    }

    async fn check(&self, (_, file): Dropped) -> Result<FileUse, Error> {
        let owner = self.owner();
        let asked = self
            .world
            .ask(&owner, UserId::gateway(), CheckFile { file }.into());
        match asked.await {
            Some(Ok(Outcome::FileUse(found))) => Ok(found),
            Some(Err(error)) => Err(error),
            _ => Err(Error::Closed),
        }
    }

    async fn inspect(&self, file: AttachmentId, _: &FileFacts) {
        self.world.bytes.inspect(&self.world.store, file).await;
    }
}

impl World {
    fn random(&self, most: u64) -> u64 {
        self.random.lock().unwrap().random_range(0..=most)
    }

    async fn pause(&self, milliseconds: Range<u64>) {
        let drawn = self.random.lock().unwrap().random_range(milliseconds);
        sleep(Duration::from_millis(drawn)).await;
    }

    /// Waits while everyone rests.
    async fn activity(&self) {
        while !self.is_active.load(Ordering::Relaxed) {
            self.resumed.notified().await;
        }
    }

    fn report(&self, text: String) {
        self.findings.lock().unwrap().push(text);
    }

    fn newest(&self) -> Site {
        self.sites.lock().unwrap().last().unwrap().clone()
    }

    /// Mostly the newest owner, sometimes a deposed one that does not know it.
    fn some(&self) -> Site {
        let back = if self.random(9) < 3 {
            self.random(2) as usize
        } else {
            0
        };
        let sites = self.sites.lock().unwrap();
        sites[sites.len().saturating_sub(1 + back)].clone()
    }

    fn appoint(self: &Arc<Self>) {
        let mut sites = self.sites.lock().unwrap();
        // The earliest ones are gone, and nobody asks them any more.
        if let Some(gone) = sites.len().checked_sub(3) {
            sites[gone].gateway.process.kill();
        }
        let process = Process::default();
        let tasks = Tasks::of(process.clone());
        let (eraser, waiting) = Eraser::new();
        let store = Arc::new(self.store.share());
        let number = sites.len();
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        let dropping = Dropping(eraser.clone());
        let gateway = Gateway::open(number + 1, epoch, store.clone(), dropping, process);
        let site = Site {
            gateway,
            tasks: tasks.clone(),
            eraser,
            store,
        };
        let place = Place {
            world: self.clone(),
            store: site.store.clone(),
            number,
            owner: Mutex::new((Instant::now(), site.clone())),
        };
        tasks.spawn(Eraser::run(place, waiting));
        sites.push(site);
    }

    /// Runs a request in the process of a gateway. `None` if it does not answer in time.
    async fn on<T: Send + 'static, F>(
        &self,
        site: &Site,
        request: impl FnOnce(Conversations) -> F,
    ) -> Option<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        let work = request(site.gateway.conversations.clone());
        site.tasks
            .spawn(async move { drop(answer.send(work.await)) });
        timeout(PATIENCE, answered).await.ok()?.ok()
    }

    async fn ask(
        &self,
        site: &Site,
        actor: UserId,
        operation: Operation,
    ) -> Option<Result<Outcome, Error>> {
        let id = self.conversation;
        let request = |owner: Conversations| async move { owner.ask(id, actor, operation).await };
        self.on(site, request).await
    }

    /// Deposes owners while users are active. Each ends in its own way.
    async fn ring(self: Arc<Self>) {
        loop {
            let tenure = if self.lonely {
                2_000..80_000
            } else {
                200..6_000
            };
            let killed = tokio::select! {
                biased;
                () = self.sending.notified() => true,
                () = self.pause(tenure) => false,
            };
            self.activity().await;
            if killed {
                self.pause(20..200).await;
                self.newest().gateway.process.kill();
            }
            self.depose().await;
        }
    }

    async fn depose(self: &Arc<Self>) {
        let owner = self.newest();
        let process = owner.gateway.process.clone();
        let fate = self.random(9);
        match fate {
            0..2 => process.kill(),
            2..4 => {
                process.pause();
                let paused = Duration::from_millis(500 + self.random(8_000));
                spawn(async move {
                    sleep(paused).await;
                    process.resume();
                });
            }
            4..6 => owner.store.set_reach(Reach::Late),
            6..8 => owner.store.set_reach(Reach::One),
            _ => {}
        }
        let ends = Instant::now() + Duration::from_millis(self.random(1_000));
        owner.gateway.lease.end_at(ends);
        sleep(ends - Instant::now() + Duration::from_millis(1)).await;
        if fate == 7 {
            owner.gateway.process.kill();
        }
        self.appoint();
    }
}

/// Lets hours pass, of which people's clocks tell. Only the last minutes are simulated, with a sweep or two.
async fn pass(ahead: &mut Millis, hours: Millis) {
    *ahead += hours * 3_600_000;
    clock::set_ahead(*ahead);
    sleep(QUIET).await;
}

#[expect(clippy::disallowed_methods, reason = "it belongs to no process")]
fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(work);
}

async fn create(world: &World) {
    loop {
        let creation = Operation::Create(Creation {
            kind: Kind::Group,
            participants: (1..USERS).map(user).collect(),
            name: None,
            public: false,
            posting: Posting::Everyone,
            at: None,
        });
        let owner = world.newest();
        let asked = world.ask(&owner, user(0), creation);
        if matches!(asked.await, Some(Ok(_))) {
            return;
        }
    }
}

/// What one run did, and found.
struct Found {
    findings: Vec<String>,
    messages: usize,
    erased: usize,
    /// Cells that some replica has at the end.
    cells: usize,
}

async fn run(seed: u64) -> Found {
    let lonely = seed.is_multiple_of(3);
    let faults = match seed % 5 {
        0 | 1 => Faults::BAD_DAY,
        _ => WORSE_DAY,
    };
    let world = Arc::new(World {
        conversation: ConversationId(Uuid::from_u128(0x4000_8000_0000_0000_0000_0000)),
        store: Arc::new(Simulated::new(seed, faults)),
        bytes: Arc::new(Bytes::new(seed, seed.is_multiple_of(2))),
        sites: Mutex::default(),
        epoch: AtomicU64::new(0),
        is_active: AtomicBool::new(true),
        resumed: Notify::new(),
        sending: Notify::new(),
        lonely,
        sent: Mutex::default(),
        uploads: Mutex::default(),
        findings: Mutex::default(),
        random: Mutex::new(StdRng::seed_from_u64(seed)),
    });
    world.appoint();
    create(&world).await;
    spawn(world.clone().ring());
    for number in 0..if lonely { 1 } else { USERS } {
        spawn(world.clone().uses(user(number)));
    }
    let mut ahead = 0;
    for _ in 0..ROUNDS {
        world.is_active.store(true, Ordering::Relaxed);
        world.resumed.notify_waiters();
        sleep(if lonely { 12 * ACTIVE } else { ACTIVE }).await;
        world.is_active.store(false, Ordering::Relaxed);
        pass(&mut ahead, [0, 0, 2, 30][world.random(3) as usize]).await;
    }
    world.store.set_faults(Faults::NONE);
    world.bytes.set_reliable();
    sleep(Duration::from_secs(60)).await;
    world.newest().gateway.lease.end_at(Instant::now());
    world.appoint();
    for _ in 0..SWEPT_WITHIN_DAYS {
        pass(&mut ahead, 24).await;
    }
    check(&world).await;
    let findings = std::mem::take(&mut *world.findings.lock().unwrap());
    Found {
        findings,
        messages: world.sent.lock().unwrap().len(),
        erased: world.bytes.erased(),
        cells: world.store.copies().len(),
    }
}

async fn whole(world: &World) -> Option<Page> {
    let operation = Operation::History {
        range: LogRange::After(0),
        limit: 1_000,
    };
    match world.ask(&world.newest(), user(0), operation).await {
        Some(Ok(Outcome::History(page))) if page.entries.len() as u64 == page.head => Some(page),
        other => {
            world.report(format!("the last owner answers {other:?}"));
            None
        }
    }
}

/// Compares what users know with the log, the rows of the files and their bytes.
async fn check(world: &World) {
    let Some(page) = whole(world).await else {
        return;
    };
    let mut named: BTreeMap<AttachmentId, Seq> = BTreeMap::new();
    let mut of: BTreeMap<Seq, (ClientId, BTreeSet<AttachmentId>)> = BTreeMap::new();
    for entry in &page.entries {
        let state = page.states.iter().find(|(seq, _)| *seq == entry.seq);
        let files = entry.attachments(state.map(|(_, state)| &**state));
        let files: BTreeSet<_> = files.iter().filter_map(|file| file.id).collect();
        named.extend(files.iter().map(|&file| (file, entry.seq)));
        of.insert(entry.seq, (entry.client_id, files));
    }
    for (client_id, sent) in &*world.sent.lock().unwrap() {
        match of.get(&sent.seq) {
            Some((found, files)) if found == client_id => {
                for file in sent.required.difference(files) {
                    world.report(format!("message {} lost file {file}", sent.seq));
                }
            }
            other => world.report(format!("message {} is now {other:?}", sent.seq)),
        }
    }
    let uploads = world.uploads.lock().unwrap().clone();
    for file in uploads {
        let state = world.store.file(file).await.unwrap().map(|row| row.state);
        match named.get(&file) {
            None if world.bytes.has_any(file) => world.report(format!("{file} ({state:?}){LEFT}")),
            Some(seq) if !world.bytes.is_complete(file) => {
                world.report(format!(
                    "message {seq} names {file} ({state:?}){WITHOUT_BYTES}"
                ));
            }
            Some(seq) if !matches!(state, Some(FileState::Ready | FileState::Erasing)) => {
                world.report(format!("message {seq} names {file}, which is {state:?}"));
            }
            _ => {}
        }
    }
    // Each day is swept when it is over, and what is left then is the work of another day.
    let shards = world.store.work_shards().await.unwrap();
    let left: Vec<_> = shards
        .iter()
        .filter(|s| s.day + 1 < clock::today())
        .collect();
    if !left.is_empty() {
        world.report(format!("these days are never swept: {left:?}"));
    }
}

fn simulate(seed: u64, broken: Option<Mutation>) -> Found {
    break_rule(broken);
    let found = paused(seed, run(seed));
    break_rule(None);
    found
}

#[test]
fn no_message_lacks_a_file_and_none_is_left_when_owners_change() {
    let first = setting("FROM").unwrap_or(0);
    let seeds = setting("SEEDS").unwrap_or(100);
    let (mut messages, mut erased, mut failed) = (0, 0, Vec::new());
    for seed in first..first + seeds {
        let found = simulate(seed, None);
        messages += found.messages;
        erased += found.erased;
        if let Some(finding) = found.findings.first() {
            println!("seed {seed}: {:#?}", found.findings);
            failed.push(format!("seed {seed}: {finding}"));
        }
    }
    println!("{seeds} seeds, {messages} acknowledged messages, {erased} erased files");
    assert!(
        failed.is_empty(),
        "{} of {seeds} seeds fail: {failed:#?}",
        failed.len()
    );
    assert!(
        messages as u64 > seeds * 10 && erased as u64 > seeds * 10,
        "too little was done: {messages} messages, {erased} erased files"
    );
}

#[test]
fn a_seed_repeats_exactly() {
    for seed in 0..6 {
        let run = || {
            let found = simulate(seed, None);
            (found.findings, found.messages, found.erased, found.cells)
        };
        assert_eq!(run(), run(), "seed {seed}");
    }
}

#[test]
fn each_broken_rule_of_files_is_found() {
    // Each needs several things that seldom come together, so its search begins shortly before a seed that finds it.
    let rules: [(Mutation, u64, &[&str]); 5] = [
        (Mutation::Fence, 440, &[WITHOUT_BYTES]),
        (Mutation::ReferencesAppend, 130, &[WITHOUT_BYTES]),
        (Mutation::ReferencesSettle, 180, &[WITHOUT_BYTES]),
        (Mutation::EraseLease, 80, &[WITHOUT_BYTES]),
        (Mutation::WriteWindow, 40, &[LEFT]),
    ];
    require(rules.map(|(rule, near, kinds)| {
        let first = setting("FROM").unwrap_or(near);
        let seeds = first..first + setting("SEEDS").unwrap_or(3_000);
        find(rule, seeds, kinds, |seed, is_broken| {
            simulate(seed, is_broken.then_some(rule)).findings
        })
    }));
}
