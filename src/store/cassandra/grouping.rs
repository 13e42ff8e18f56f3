//! Which units go into one batch, and to which node it is sent.
//!
//! All units of a batch have a replica in common, and that node is asked to write it: it writes its own copies itself, and
//! sends the others on. Grouping by the whole set of replicas would be simpler, but nearly no two units have the same
//! set in a cluster of many nodes.

use std::{collections::BTreeMap, sync::Arc};

use scylla::{
    cluster::{ClusterState, NodeRef},
    policies::load_balancing::{FallbackPlan, LoadBalancingPolicy, RoutingInfo},
    routing::{Shard, Token},
    serialize::row::SerializeRow,
    statement::prepared::PreparedStatement,
};
use uuid::Uuid;

use super::connect::Settings;

/// Units of one batch. Cassandra warns above ten partitions (`unlogged_batch_across_partitions_warn_threshold`).
const BATCH_UNITS_MAX: usize = 10;
/// Bytes of a batch of several units, as estimated here. By its own count Cassandra warns at 5 KiB
/// (`batch_size_warn_threshold`) and refuses at 50 KiB.
const BATCH_BYTES_MAX: usize = 3_500;

/// The units of one batch.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Packed<T, N = Uuid> {
    /// A replica of all units. `None` if any node will do.
    pub(super) replica: Option<N>,
    pub(super) units: Vec<T>,
}

/// Groups units into batches. Each unit has its bytes and its replicas; units without replicas are grouped with each
/// other. `turn` goes from call to call.
///
/// A batch begins with the oldest unit that is left. Of this unit's replicas it gets the one with the most units that are
/// left, as far as a batch has room for them, and then the oldest units of that replica. Replicas that are as good as each
/// other take turns. Counting costs as many steps as the replicas have units, for each batch.
pub(super) fn group<T, N: Copy + Ord>(
    units: Vec<(usize, Vec<N>, T)>,
    turn: &mut usize,
) -> Vec<Packed<T, N>> {
    let mut left: BTreeMap<Option<N>, Vec<usize>> = BTreeMap::new();
    for (index, (_, replicas, _)) in units.iter().enumerate() {
        for replica in keys(replicas) {
            left.entry(replica).or_default().push(index);
        }
    }
    let mut units: Vec<_> = units.into_iter().map(Some).collect();
    let mut packed = Vec::new();
    for first in 0..units.len() {
        let Some((_, replicas, _)) = &units[first] else {
            continue;
        };
        let mut candidates: Vec<_> = keys(replicas).collect();
        let count = candidates.len();
        candidates.rotate_left(*turn % count);
        *turn = turn.wrapping_add(1);
        let best = candidates.into_iter().max_by_key(|replica| {
            let indices = left.get_mut(replica);
            indices.map_or(0, |indices| {
                indices.retain(|index| units[*index].is_some());
                indices.len().min(BATCH_UNITS_MAX)
            })
        });
        let replica = best.flatten();
        let mut batch = Packed {
            replica,
            units: Vec::new(),
        };
        let mut size = 0;
        for &index in left.get(&replica).into_iter().flatten() {
            if batch.units.len() == BATCH_UNITS_MAX {
                break;
            }
            let fits = |(bytes, ..): &mut (usize, _, _)| {
                batch.units.is_empty() || size + *bytes <= BATCH_BYTES_MAX
            };
            if let Some((bytes, _, unit)) = units[index].take_if(fits) {
                size += bytes;
                batch.units.push(unit);
            }
        }
        packed.push(batch);
    }
    packed
}

/// Returns the replicas of a unit, or `None` alone if it has none.
fn keys<N: Copy>(replicas: &[N]) -> impl Iterator<Item = Option<N>> {
    let none = replicas.is_empty().then_some(None);
    replicas.iter().copied().map(Some).chain(none)
}

/// The nodes that may be asked.
pub(super) struct Datacenter {
    /// `None` if there is only one.
    name: Option<String>,
    copies: usize,
}

impl Datacenter {
    pub(super) fn of(settings: &Settings) -> Self {
        let name = settings.datacenter.clone();
        let keyspace = &settings.keyspace;
        let mine = keyspace.copies(name.as_deref().unwrap_or_default());
        // Without a name there is one datacenter, and one entry.
        let mine = mine.or_else(|| keyspace.replication.values().next().copied());
        Self {
            name,
            copies: mine.map_or(1, |copies| copies as usize),
        }
    }

    fn has(&self, node: NodeRef<'_>) -> bool {
        self.name.is_none() || node.datacenter == self.name
    }

    /// Whether there are so few nodes that each has everything.
    pub(super) fn all_are_replicas(&self, state: &ClusterState) -> bool {
        let nodes = state.get_nodes_info().iter();
        nodes.filter(|node| self.has(node)).count() <= self.copies
    }

    /// Returns the connected replicas of the partition of a statement.
    pub(super) fn replicas(
        &self,
        state: &ClusterState,
        statement: &PreparedStatement,
        values: &impl SerializeRow,
    ) -> Vec<Uuid> {
        let token: Option<Token> = statement.calculate_token(values).ok().flatten();
        let (Some(token), Some(table)) = (token, statement.get_table_spec()) else {
            return Vec::new();
        };
        let nodes = state.get_token_endpoints(table.ks_name(), table.table_name(), token);
        let nodes = nodes.iter().map(|(node, _)| node);
        let usable = nodes.filter(|node| self.has(node) && node.is_connected());
        usable.map(|node| node.host_id).collect()
    }
}

/// Sends a batch to one replica first, and then to the nodes to which its first statement would be sent otherwise.
#[derive(Debug)]
pub(super) struct First {
    pub(super) replica: Uuid,
    pub(super) nodes: Arc<dyn LoadBalancingPolicy>,
}

impl LoadBalancingPolicy for First {
    fn pick<'a>(
        &'a self,
        request: &'a RoutingInfo,
        cluster: &'a ClusterState,
    ) -> Option<(NodeRef<'a>, Option<Shard>)> {
        let node = cluster.get_node_by_host_id(self.replica);
        let Some(node) = node.filter(|node| node.is_connected()) else {
            return self.nodes.pick(request, cluster);
        };
        // As the driver computes it, so that it passes over this node when it asks further ones.
        let shard_of = |token| node.sharder().map_or(0, |sharder| sharder.shard_of(token));
        let shard = request.token.map(shard_of);
        Some((node, shard))
    }

    fn fallback<'a>(
        &'a self,
        request: &'a RoutingInfo,
        cluster: &'a ClusterState,
    ) -> FallbackPlan<'a> {
        self.nodes.fallback(request, cluster)
    }

    fn name(&self) -> String {
        "First".into()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};

    use super::*;

    const NODES: usize = 24;
    const RACKS: usize = 3;
    const RANGES_OF_A_NODE: usize = 16;

    /// Returns the replicas of each range: the next node of each rack. Each rack has all ranges.
    fn ranges(random: &mut StdRng) -> Vec<Vec<usize>> {
        let mut ring = Vec::new();
        for _ in 0..RANGES_OF_A_NODE {
            let mut racks: Vec<Vec<usize>> = (0..RACKS)
                .map(|rack| (rack..NODES).step_by(RACKS).collect())
                .collect();
            racks.iter_mut().for_each(|rack| rack.shuffle(random));
            ring.extend((0..NODES).map(|index| racks[index % RACKS][index / RACKS]));
        }
        let count = ring.len();
        let next = |range: usize, rack| {
            let mut nodes = (range..range + count).map(|index| ring[index % count]);
            nodes.find(|node| node % RACKS == rack)
        };
        let replicas = |range| (0..RACKS).filter_map(|rack| next(range, rack)).collect();
        (0..count).map(replicas).collect()
    }

    fn units_of(
        count: usize,
        ranges: &[Vec<usize>],
        random: &mut StdRng,
    ) -> Vec<(usize, Vec<usize>, usize)> {
        let unit = |index| {
            (
                200,
                ranges[random.random_range(0..ranges.len())].clone(),
                index,
            )
        };
        (0..count).map(unit).collect()
    }

    /// Grouped by the whole set of replicas, so many units would be in a batch: 1.1 of 64, 1.6 of 256.
    #[test]
    fn batches_are_large_with_many_nodes_and_every_node_gets_some() {
        let random = &mut StdRng::seed_from_u64(7);
        let ranges = ranges(random);
        let mut turn = 0;
        for (count, least) in [(64, 5.5), (256, 8.0)] {
            let (mut batches, mut by_set) = (0, 0);
            let mut asked = [0; NODES];
            for _ in 0..200 {
                let units = units_of(count, &ranges, random);
                let sets: BTreeSet<_> = units.iter().map(|(_, replicas, _)| replicas).collect();
                by_set += sets.len();
                let packed = group(units, &mut turn);
                batches += packed.len();
                for batch in packed {
                    asked[batch.replica.unwrap()] += batch.units.len();
                }
            }
            let all = 200.0 * count as f64;
            let (mean, mean_by_set) = (all / batches as f64, all / by_set as f64);
            assert!(mean > least && mean_by_set < 2.0, "{mean}, {mean_by_set}");
            let share = |asked: &usize| *asked as f64 * NODES as f64 / all;
            let shares: Vec<f64> = asked.iter().map(share).collect();
            assert!(
                shares.iter().all(|share| (0.7..1.3).contains(share)),
                "{shares:?}"
            );
        }
    }

    #[test]
    fn each_unit_is_in_one_batch_whose_node_is_its_replica_and_the_oldest_goes_first() {
        let random = &mut StdRng::seed_from_u64(11);
        let ranges = ranges(random);
        let mut units = units_of(200, &ranges, random);
        units[3].1.clear();
        units[5].0 = BATCH_BYTES_MAX + 1;
        units[190].1.clear();
        let packed = group(units.clone(), &mut 0);
        assert!(packed.is_sorted_by_key(|batch| batch.units[0]));
        let mut seen: Vec<usize> = Vec::new();
        for Packed {
            replica,
            units: indices,
        } in packed
        {
            let bytes: usize = indices.iter().map(|&index| units[index].0).sum();
            assert!(indices.len() <= BATCH_UNITS_MAX);
            assert!(bytes <= BATCH_BYTES_MAX || indices == [5]);
            for &index in &indices {
                let replicas = &units[index].1;
                assert!(replica.map_or(replicas.is_empty(), |node| replicas.contains(&node)));
            }
            seen.extend(indices);
        }
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..200));
    }

    #[test]
    fn if_every_node_will_do_batches_are_full() {
        let units = (0..25).map(|index| (100, Vec::new(), index)).collect();
        let packed = group::<_, usize>(units, &mut 0);
        let sizes: Vec<usize> = packed.iter().map(|batch| batch.units.len()).collect();
        assert_eq!(sizes, [10, 10, 5]);
    }
}
