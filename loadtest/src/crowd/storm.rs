//! Drops all clients at once and reconnects them with their cursors while messages flow. Measures how long it takes
//! until everyone has everything, and what that costs the store, and checks that nothing is missed.

use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use serde_json::json;

use crate::{
    Common,
    client::Client,
    crowd::{
        BACK_OFF, Crowd,
        channel::{Channel, Publisher, WARM_UP},
    },
    data::Data,
    report::Report,
    server::{Server, token, total_cpu},
    store::celebrity,
};

#[derive(Args)]
pub(crate) struct Options {
    /// Participants of a channel, all connected
    #[arg(long, default_value_t = 15_000)]
    subscribers: usize,
    /// Messages per second, before, during and after the storm
    #[arg(long, default_value_t = 4.0)]
    rate: f64,
    /// Bytes of a body
    #[arg(long, default_value_t = 200)]
    size: usize,
    /// Seconds before the storm, and after it
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Gateways, over one store; more than one needs --cassandra
    #[arg(long, default_value_t = 1)]
    gateways: usize,
}

/// Goal for the reads of the store for each client: next to nothing.
const READS_PER_CLIENT_MAX: f64 = 0.1;
/// Time without a delivery or a reconnect after which no more is expected.
const QUIET: Duration = Duration::from_secs(10);

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("reconnect-storm", &common.outputs);
    let data = Data::new(common)?;
    let servers = Server::gateways(common, &data, options.gateways)?;
    let mut owner = Client::connect(&servers[0].address, celebrity::OWNER, 0)?;
    let channel = celebrity::channel(&mut owner, options.subscribers + 1)?;
    let tokens = (0..options.subscribers)
        .map(|n| token(&celebrity::fan(n)))
        .collect::<Result<Vec<_>, _>>()?;
    let mut crowd = Crowd::new(servers.len())?;
    crowd.connect(tokens.len(), |number| {
        let address = &servers[number % servers.len()].address;
        Client::connect_with(address, &tokens[number], number)
    })?;
    // The owner's first connection has answered no pings meanwhile, so it may be closed.
    let publisher = Client::connect(&servers[0].address, celebrity::OWNER, 0)?;
    let publisher = Publisher::new(publisher, true)?;
    let mut fans = Fans {
        channel: Channel::on(servers, channel, crowd, publisher, options.size),
        tokens,
    };
    let epoch = fans.channel.crowd.epoch;
    let length = Duration::from_secs(options.seconds);
    let (quiet, quiet_reads) = (epoch.elapsed(), reads(&fans.channel.servers)?);
    fans.channel.paced(options.rate, WARM_UP + length)?;
    let reads_in_quiet = reads(&fans.channel.servers)? - quiet_reads;
    let reads_per_second = reads_in_quiet / (epoch.elapsed() - quiet).as_secs_f64();
    let storm = Storm::measure(&mut fans, options.rate)?;
    fans.channel.clear();
    storm.tell(&mut report, options.subscribers);
    if data.cluster.is_some() {
        ensure!(quiet_reads > 0.0, "the gateways do not count their reads");
        storm.tell_reads(&mut report, options.subscribers, reads_per_second);
    }

    // A message can arrive both in the resume and as an event. Clients ignore a seq that they have.
    let twice = std::mem::take(&mut fans.channel.crowd.counts.doubled);
    report.figure("came twice while coming back", twice as f64, "");
    fans.channel.paced(options.rate, length)?;
    let again = storm.again + fans.insist()?;
    fans.channel.clear();
    report.figure("refused, and came again", again as f64, "");
    let resyncs = fans.channel.crowd.counts.resyncs;
    report.figure("told to read what they lacked", resyncs as f64, "");
    fans.channel.finish(&mut report, "the storm")?;
    report.finish()
}

/// The clients of a channel, and their tokens.
struct Fans<'a> {
    channel: Channel<'a>,
    tokens: Vec<String>,
}

impl Fans<'_> {
    /// Waits until all messages have arrived everywhere, or nothing has arrived for `QUIET`. Refused clients connect
    /// again. Returns the number of these attempts.
    fn insist(&mut self) -> anyhow::Result<usize> {
        let mut again = 0;
        let tokens = &self.tokens;
        self.channel.settle_while(QUIET, |channel| {
            let before = again;
            while let Some(number) = channel.crowd.gone(BACK_OFF) {
                come_back(channel, number, &tokens[number])?;
                again += 1;
                channel.crowd.read(Duration::ZERO)?;
            }
            Ok(again > before)
        })?;
        Ok(again)
    }
}

/// Connects a client again, with its cursor.
fn come_back(channel: &mut Channel<'_>, number: usize, token: &str) -> anyhow::Result<()> {
    let address = &channel.servers[number % channel.servers.len()].address;
    let mut client = Client::open(address, "/v1/ws", number)?;
    let cursors = json!({ (&channel.id): [channel.crowd.cursor(number), 0] });
    client.begin(json!({"type": "connect", "token": token, "cursors": cursors}))?;
    channel.crowd.come_back(number, client.into_stream())
}

/// The cost of a storm.
struct Storm {
    /// Time until all clients were connected again.
    all_back: Duration,
    /// Time until all clients had all messages.
    caught_up: Duration,
    /// Messages sent meanwhile.
    missed: u64,
    /// Attempts after a refusal.
    again: usize,
    /// Reads of the shared store.
    reads: f64,
    cpu: Duration,
}

impl Storm {
    /// Drops all clients. One thread reconnects them, as fast as it can, while messages are sent.
    fn measure(fans: &mut Fans<'_>, rate: f64) -> anyhow::Result<Self> {
        let Fans { channel, tokens } = fans;
        let (reads, cpu) = (self::reads(&channel.servers)?, total_cpu(&channel.servers)?);
        let epoch = channel.crowd.epoch;
        let began = epoch.elapsed();
        channel.crowd.drop_all();
        let each = Duration::from_secs_f64(1.0 / rate);
        let mut due = began;
        let before = channel.number;
        for (number, token) in tokens.iter().enumerate() {
            come_back(channel, number, token)?;
            while epoch.elapsed() > due {
                channel.publish(due)?;
                due += each;
            }
            if number % 16 == 0 {
                channel.crowd.read(Duration::ZERO)?;
                channel.progress.set_message(format!("{number} are back"));
                channel.progress.tick();
            }
        }
        let all_back = epoch.elapsed() - began;
        let again = fans.insist()?;
        let servers = &fans.channel.servers;
        Ok(Self {
            all_back,
            caught_up: epoch.elapsed() - began,
            missed: fans.channel.number - before,
            again,
            reads: self::reads(servers)? - reads,
            cpu: total_cpu(servers)? - cpu,
        })
    }

    fn tell(&self, report: &mut Report, clients: usize) {
        println!(
            "  {} messages were sent while {clients} clients came back",
            self.missed
        );
        report.figure(
            "all connected again after",
            self.all_back.as_secs_f64(),
            "s",
        );
        report.figure("all caught up after", self.caught_up.as_secs_f64(), "s");
        report.figure(
            "CPU per client that came back",
            self.cpu.as_secs_f64() * 1e3 / clients as f64,
            "ms",
        );
    }

    /// `reads_per_second` are the reads in quiet: gateways always read the ring and each other's heartbeats.
    fn tell_reads(&self, report: &mut Report, clients: usize, reads_per_second: f64) {
        report.figure("store reads during the storm", self.reads, "");
        let anyway = reads_per_second * self.caught_up.as_secs_f64();
        report.at_most(
            "store reads per client, beyond those of quiet",
            (self.reads - anyway) / clients as f64,
            READS_PER_CLIENT_MAX,
            "",
        );
    }
}

/// Reads of the shared store by all gateways. The embedded store counts none.
fn reads(servers: &[Server]) -> anyhow::Result<f64> {
    let mut sum = 0.0;
    for server in servers {
        let metrics = server.metrics()?;
        sum += metrics
            .get("chat_store_request_seconds_count{kind=\"read\"}")
            .copied()
            .unwrap_or_default();
    }
    Ok(sum)
}
