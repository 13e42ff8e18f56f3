//! Drops all clients at once and reconnects them with their cursors while messages flow. Measures how long it takes
//! until everyone has everything, and what that costs the store, and checks that nothing is missed.

use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use indicatif::ProgressBar;
use serde_json::json;

use crate::{
    Common, celebrity,
    client::{Client, send_frame},
    crowd::{BACK_OFF, Crowd},
    data::Data,
    fanout::{WARM_UP, spinner},
    report::Report,
    server::{Server, token, total_cpu},
    source::{Source, settle_while},
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
    let mut owner = Client::connect(&servers[0].address, "celebrity", 0)?;
    let channel = celebrity::channel(&mut owner, options.subscribers + 1)?;
    let tokens = (0..options.subscribers)
        .map(|n| token(&celebrity::fan(n)))
        .collect::<Result<Vec<_>, _>>()?;
    let fans = Fans {
        servers: &servers,
        channel: &channel,
        tokens: &tokens,
    };
    let mut crowd = fans.connect()?;
    let compose = |body: &str| send_frame(&channel, body);
    let epoch = crowd.epoch;
    // The owner's first connection has answered no pings meanwhile, so it may be closed.
    let publisher = Client::connect(&servers[0].address, "celebrity", 0)?.into_stream();
    let mut source = Source::new(publisher, true, compose, options.size, epoch)?;
    let watches: Vec<_> = servers.iter().map(Server::watch).collect();
    let length = Duration::from_secs(options.seconds);
    let progress = spinner();
    let (quiet, quiet_reads) = (epoch.elapsed(), reads(&servers)?);
    source.paced(&mut crowd, options.rate, WARM_UP + length, &progress)?;
    let reads_in_quiet = reads(&servers)? - quiet_reads;
    let reads_per_second = reads_in_quiet / (epoch.elapsed() - quiet).as_secs_f64();
    let storm = Storm::measure(&fans, &mut crowd, &mut source, options.rate, &progress)?;
    progress.finish_and_clear();
    storm.tell(&mut report, options.subscribers);
    if data.cluster.is_some() {
        ensure!(quiet_reads > 0.0, "the gateways do not count their reads");
        storm.tell_reads(&mut report, options.subscribers, reads_per_second);
    }

    // A message can arrive both in the resume and as an event. Clients ignore a seq that they have.
    let twice = std::mem::take(&mut crowd.counts.doubled);
    report.figure("came twice while coming back", twice as f64, "");
    let progress = spinner();
    source.paced(&mut crowd, options.rate, length, &progress)?;
    let again = storm.again + fans.insist(&mut crowd, source.number)?;
    progress.finish_and_clear();
    report.figure("refused, and came again", again as f64, "");
    let resyncs = crowd.counts.resyncs;
    report.figure("told to read what they lacked", resyncs as f64, "");
    source.finish(&crowd, &mut report, "the storm")?;
    crowd.draw(&mut report, "gateway");
    for (number, watch) in (1..).zip(watches) {
        watch.stop().draw(&mut report, &format!("gateway {number}"));
    }
    report.finish()
}

/// The clients, and how they connect.
struct Fans<'a> {
    servers: &'a [Server],
    channel: &'a str,
    tokens: &'a [String],
}

impl Fans<'_> {
    fn address(&self, number: usize) -> &str {
        &self.servers[number % self.servers.len()].address
    }

    fn connect(&self) -> anyhow::Result<Crowd> {
        let connecting = ProgressBar::new(self.tokens.len() as u64);
        let mut crowd = Crowd::new(self.servers.len())?;
        for (number, token) in self.tokens.iter().enumerate() {
            let client = Client::connect_with(self.address(number), token, number)?;
            crowd.join(client.into_stream())?;
            connecting.inc(1);
        }
        connecting.finish_and_clear();
        Ok(crowd)
    }

    /// Connects a client again, with its cursor.
    fn come_back(&self, crowd: &mut Crowd, number: usize) -> anyhow::Result<()> {
        let mut client = Client::open(self.address(number), "/v1/ws", number)?;
        let cursors = json!({ (self.channel): [crowd.cursor(number), 0] });
        let token = &self.tokens[number];
        client.begin(json!({"type": "connect", "token": token, "cursors": cursors}))?;
        crowd.come_back(number, client.into_stream())
    }

    /// Waits until all messages have arrived everywhere, or nothing has arrived for `QUIET`. Refused clients connect
    /// again. Returns the number of these attempts.
    fn insist(&self, crowd: &mut Crowd, sent: u64) -> anyhow::Result<usize> {
        let mut again = 0;
        settle_while(crowd, sent, QUIET, |crowd| {
            let before = again;
            while let Some(number) = crowd.gone(BACK_OFF) {
                self.come_back(crowd, number)?;
                again += 1;
                crowd.read(Duration::ZERO)?;
            }
            Ok(again > before)
        })?;
        Ok(again)
    }
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
    fn measure(
        fans: &Fans<'_>,
        crowd: &mut Crowd,
        source: &mut Source<'_>,
        rate: f64,
        progress: &ProgressBar,
    ) -> anyhow::Result<Self> {
        let (reads, cpu) = (self::reads(fans.servers)?, total_cpu(fans.servers)?);
        let epoch = crowd.epoch;
        let began = epoch.elapsed();
        crowd.drop_all();
        let each = Duration::from_secs_f64(1.0 / rate);
        let mut due = began;
        let before = source.number;
        for number in 0..fans.tokens.len() {
            fans.come_back(crowd, number)?;
            while epoch.elapsed() > due {
                source.publish(due)?;
                due += each;
            }
            if number % 16 == 0 {
                crowd.read(Duration::ZERO)?;
                progress.set_message(format!("{number} are back"));
                progress.tick();
            }
        }
        let all_back = epoch.elapsed() - began;
        let again = fans.insist(crowd, source.number)?;
        Ok(Self {
            all_back,
            caught_up: epoch.elapsed() - began,
            missed: source.number - before,
            again,
            reads: self::reads(fans.servers)? - reads,
            cpu: total_cpu(fans.servers)? - cpu,
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
