//! The queue of all writes, sent as unlogged batches: writes that arrive while requests are in progress are sent
//! together.
//!
//! A batch of ten small rows costs the cluster half of what ten statements cost, and this process a fifth
//! (docs/performance.md). It is not atomic: a part of it may land, as with ten statements. Only a [`Unit`], which is
//! for one partition, lands completely or not at all. With few requests in progress no write waits for others; with
//! more load the batches become larger, as in the embedded store's group commit.

use std::sync::Arc;

use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
use metrics::{Histogram, counter, histogram};
use scylla::{
    client::session::Session,
    policies::load_balancing::LoadBalancingPolicy,
    serialize::row::SerializeRow,
    statement::batch::{Batch, BatchType},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use uuid::Uuid;

use super::{
    super::{Error, Result},
    grouping::{Datacenter, First, Packed, group},
    speculation::Profile,
    statements::Write,
};

/// Units that wait for a request. Above this, callers wait.
const QUEUED_MAX: usize = 4_096;
/// Units that are packed into batches together.
const PACKED_AT_ONCE: usize = 256;

pub(super) type Values = Box<dyn SerializeRow + Send + Sync>;

/// Statements for one partition, which are written atomically.
#[derive(Default)]
pub(super) struct Unit {
    pub statements: Vec<(Arc<Write>, Values)>,
    /// The approximate size.
    pub bytes: usize,
}

impl Unit {
    pub(super) fn one(statement: &Arc<Write>, values: Values, bytes: usize) -> Self {
        Self {
            statements: vec![(statement.clone(), values)],
            bytes,
        }
    }
}

/// Adds units for the same partition.
impl Extend<Unit> for Unit {
    fn extend<T: IntoIterator<Item = Unit>>(&mut self, others: T) {
        for other in others {
            self.statements.extend(other.statements);
            self.bytes += other.bytes;
        }
    }
}

pub(super) struct Queued {
    unit: Unit,
    done: oneshot::Sender<Option<String>>,
}

/// The sender of the write queue.
pub(super) struct Batches {
    queue: mpsc::Sender<Queued>,
}

impl Batches {
    /// Returns the sender, and the receiver for [`run`].
    pub(super) fn new() -> (Self, mpsc::Receiver<Queued>) {
        let (queue, queued) = mpsc::channel(QUEUED_MAX);
        (Self { queue }, queued)
    }

    /// Writes all `units`. Returns when all of them are answered.
    pub(super) async fn write(&self, operation: &'static str, units: Vec<Unit>) -> Result<()> {
        let closed = || Error::Unavailable {
            operation,
            reason: "the store is closed".into(),
        };
        let mut answers = Vec::with_capacity(units.len());
        for unit in units {
            let (done, answer) = oneshot::channel();
            let queued = Queued { unit, done };
            self.queue.send(queued).await.map_err(|_| closed())?;
            answers.push(answer);
        }
        // It waits for all of them, even after an error, so that a retry does not race with its own first attempt.
        for answer in join_all(answers).await {
            if let Some(reason) = answer.map_err(|_| closed())? {
                return Err(Error::Unavailable { operation, reason });
            }
        }
        Ok(())
    }
}

/// The settings for sending batches.
pub(super) struct Sending {
    pub session: Arc<Session>,
    pub profile: Profile,
    pub in_flight_max: usize,
    /// Chooses the nodes of requests that are for no node in particular.
    pub nodes: Arc<dyn LoadBalancingPolicy>,
    pub datacenter: Datacenter,
}

/// Sends queued writes until `closing` fires, then the rest of the queue.
pub(super) async fn run(
    sending: Sending,
    mut queue: mpsc::Receiver<Queued>,
    closing: impl Future<Output = ()> + Send,
) {
    let sizes = histogram!("chat_store_batch_rows");
    let seconds = histogram!("chat_store_request_seconds", "kind" => "write");
    let mut closing = std::pin::pin!(closing);
    let mut closed = false;
    let mut ready: Vec<Packed<Queued>> = Vec::new();
    let mut turn = 0;
    let mut in_flight = FuturesUnordered::new();
    let mut taken = Vec::with_capacity(PACKED_AT_ONCE);
    loop {
        while in_flight.len() < sending.in_flight_max
            && let Some(batch) = ready.pop()
        {
            let rows = batch.units.iter().map(|q| q.unit.statements.len());
            sizes.record(rows.sum::<usize>() as f64);
            in_flight.push(send(&sending, batch, &seconds));
        }
        tokio::select! {
            biased;
            Some(()) = in_flight.next(), if !in_flight.is_empty() => {}
            count = queue.recv_many(&mut taken, PACKED_AT_ONCE), if ready.is_empty() => {
                if count == 0 {
                    while in_flight.next().await.is_some() {}
                    return;
                }
                ready = pack(&sending, &mut taken, &mut turn);
            }
            () = &mut closing, if !closed => {
                closed = true;
                queue.close();
            }
        }
    }
}

/// Packs units into batches within the limits. The batch that was queued first is the last of the vector, which is sent
/// first.
fn pack(sending: &Sending, taken: &mut Vec<Queued>, turn: &mut usize) -> Vec<Packed<Queued>> {
    let state = sending.session.get_cluster_state();
    let replicas: Vec<Vec<Uuid>> = if sending.datacenter.all_are_replicas(&state) {
        vec![Vec::new(); taken.len()]
    } else {
        let of = |(statement, values): &(Arc<Write>, Values)| {
            let statement = &statement.prepared;
            sending.datacenter.replicas(&state, statement, values)
        };
        let first = |queued: &Queued| queued.unit.statements.first().map_or_else(Vec::new, of);
        taken.iter().map(first).collect()
    };
    let units = taken.drain(..).zip(replicas);
    let units = units.map(|(queued, replicas)| (queued.unit.bytes, replicas, queued));
    let mut packed = group(units.collect(), turn);
    packed.reverse();
    packed
}

async fn send(
    sending: &Sending,
    Packed {
        replica,
        units: mut queued,
    }: Packed<Queued>,
    seconds: &Histogram,
) {
    // A caller that gave up needs no write now. It may retry later.
    queued.retain(|q| !q.done.is_closed());
    let began = Instant::now();
    let statements: Vec<_> = queued.iter().flat_map(|q| &q.unit.statements).collect();
    let Sending {
        session, profile, ..
    } = sending;
    let result = match &statements[..] {
        [] => return,
        [(statement, values)] => session.execute_unpaged(&statement.prepared, values).await,
        several => {
            let mut batch = Batch::new(BatchType::Unlogged);
            for (statement, _) in several {
                batch.append_statement(statement.prepared.clone());
            }
            batch.set_is_idempotent(true);
            batch.set_execution_profile_handle(Some(profile.handle.clone()));
            batch.set_history_listener(profile.speculation.clone());
            if let Some(replica) = replica {
                let nodes = sending.nodes.clone();
                batch.set_load_balancing_policy(Some(Arc::new(First { replica, nodes })));
            }
            let values: Vec<&Values> = several.iter().map(|(_, values)| values).collect();
            session.batch(&batch, values).await
        }
    };
    seconds.record(began.elapsed());
    if result.is_ok() {
        for (statement, _) in statements {
            statement.rows.increment(1);
        }
    }
    let failed = result.err().map(|error| {
        counter!("chat_store_requests_failed_total", "kind" => "write").increment(1);
        error.to_string()
    });
    for Queued { done, .. } in queued {
        drop(done.send(failed.clone()));
    }
}
