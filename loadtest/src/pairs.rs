//! Runs scenarios against two builds of the gateway in turn, in pairs, to see how much more this build costs than a
//! base build. The ratio of a pair compares two runs next to each other, and each build is first in every second pair,
//! so other work on the machine affects both alike. The median of the ratios ignores the pairs in which it did not.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, bail};
use clap::Args;
use serde_json::{Map, Value};

use crate::{
    Common,
    data::Data,
    report::Report,
    server::{other_build, this_build},
    spread::Spread,
};

#[derive(Args)]
pub(crate) struct Options {
    /// Program of the base build; this build is --gateway, or chat-gateway in the folder of this program
    #[arg(long)]
    base: PathBuf,
    /// Pairs of runs
    #[arg(long, default_value_t = 10)]
    pairs: usize,
    /// Median of a figure's ratios, this build / base build, above which the run fails
    #[arg(long, default_value_t = 1.05)]
    limit: f64,
    /// Scenario and its options, after `--`; by default short runs of `store`, `fanout` and `idle`
    #[arg(last = true)]
    scenario: Vec<String>,
}

/// The default scenarios. Ten pairs of all three take about eight minutes.
const SHORT: [&str; 3] = [
    "store --messages 60000 --longest 0",
    "fanout --seconds 3",
    "idle --connections 4000",
];

/// The values and ratios of one figure, by pair. A ratio above 1 means that this build is worse.
#[derive(Default)]
struct Figure {
    unit: String,
    this: Vec<f64>,
    base: Vec<f64>,
    ratios: Vec<f64>,
}

/// Figures by the number of the scenario and the name.
type Figures = BTreeMap<(usize, String), Figure>;

pub(crate) fn run(common: &Common, options: &Options) -> anyhow::Result<bool> {
    let mut report = Report::new("pairs", &common.outputs);
    let this = this_build(common)?;
    let split = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let scenarios = if options.scenario.is_empty() {
        SHORT.map(split).to_vec()
    } else {
        vec![options.scenario.clone()]
    };
    let base = other_build("--base", &options.base)?;
    let data = Data::directory()?;
    let begin = Instant::now();
    let mut figures = Figures::new();
    for pair in 0..options.pairs {
        for (number, scenario) in scenarios.iter().enumerate() {
            let measure = |program: &Path| measure(common, &data, program, scenario);
            let (ours, theirs) = if pair % 2 == 0 {
                let ours = measure(&this)?;
                (ours, measure(&base)?)
            } else {
                let theirs = measure(&base)?;
                (measure(&this)?, theirs)
            };
            note(&mut figures, number, &ours, &theirs);
        }
        let seconds = begin.elapsed().as_secs();
        println!(
            "  pair {} of {}, after {seconds} s",
            pair + 1,
            options.pairs
        );
    }
    if figures.is_empty() {
        bail!("--pairs {}: nothing was measured", options.pairs);
    }
    tell(&mut report, options, &scenarios, figures);
    report.finish()
}

/// Runs a scenario against one build in a separate process. Returns the figures that can be compared.
fn measure(
    common: &Common,
    data: &Data,
    program: &Path,
    scenario: &[String],
) -> anyhow::Result<Map<String, Value>> {
    let json = data.file("figures.json");
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--gateway").arg(program);
    command.arg("--json").arg(&json);
    command.args(["--no-goals", "--alone"]);
    if !common.cassandra.is_empty() {
        command.arg("--cassandra").arg(common.cassandra.join(","));
    }
    let output = command.args(scenario).output()?;
    if !output.status.success() {
        bail!(
            "{} over {} failed:\n{}{}",
            scenario.join(" "),
            program.display(),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let mut result: Value = serde_json::from_slice(&fs::read(&json)?)?;
    let figures = result["results"]
        .as_object_mut()
        .context("the run has no figures")?;
    figures.retain(|name, _| counts(scenario, name));
    if figures.is_empty() {
        bail!(
            "{} over {} has no figure that two builds can be compared by",
            scenario.join(" "),
            program.display()
        );
    }
    Ok(std::mem::take(figures))
}

/// Whether a figure can be compared. Figures of other servers cannot, because those servers are the same for both
/// builds.
fn counts(scenario: &[String], name: &str) -> bool {
    let beside_others = scenario.iter().any(|word| word == "peers");
    more_is_worse(name).is_some() && (!beside_others || name.contains("gateway"))
}

/// Whether a higher value of a figure is worse. `None` if the figure says too little about the gateway's cost.
fn more_is_worse(name: &str) -> Option<bool> {
    let has = |what: &str| name.contains(what);
    if has("CPU_per") || has("memory_per_connection") {
        Some(true)
    } else if has("deliveries_per_second") || has("stored_messages") {
        Some(false)
    } else {
        None
    }
}

fn note(
    figures: &mut Figures,
    scenario: usize,
    ours: &Map<String, Value>,
    theirs: &Map<String, Value>,
) {
    let names: BTreeSet<_> = ours.keys().chain(theirs.keys()).collect();
    for name in names {
        let Some(worse) = more_is_worse(name) else {
            continue;
        };
        // A figure that one build lacks gets no ratio, which fails the run.
        let entry = figures.entry((scenario, name.clone())).or_default();
        let value = |of: &Map<String, Value>| of.get(name)?["value"].as_f64();
        let (Some(this), Some(base)) = (value(ours), value(theirs)) else {
            continue;
        };
        entry.unit = ours[name]["unit"].as_str().unwrap_or_default().to_owned();
        entry.this.push(this);
        entry.base.push(base);
        entry
            .ratios
            .push(if worse { this / base } else { base / this });
    }
}

fn tell(report: &mut Report, options: &Options, scenarios: &[Vec<String>], figures: Figures) {
    println!(
        "ratios to {}, above 1 is worse, medians of {} pairs:",
        options.base.display(),
        options.pairs
    );
    for ((scenario, name), figure) in figures {
        let scenario = scenarios[scenario].first().map_or("", String::as_str);
        let pairs = figure.ratios.len();
        report.must(
            pairs == options.pairs,
            format!("{scenario}: {name} was measured in only {pairs} pairs"),
        );
        let (this, base) = (Spread::of(figure.this), Spread::of(figure.base));
        let ratios = Spread::of(figure.ratios);
        report.speed_at_most(
            &format!("{scenario}: {name}"),
            ratios.median,
            options.limit,
            "",
        );
        println!(
            "  {:<44} {:.3} to {:.3}, quartiles {:.3} and {:.3}; medians {:.4} and {:.4} {}",
            "",
            ratios.at(0.0),
            ratios.at(1.0),
            ratios.at(0.25),
            ratios.at(0.75),
            this.median,
            base.median,
            figure.unit
        );
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_ratio_above_one_is_worse_for_costs_and_rates() {
        let of = |cost: f64, rate: f64| {
            let figures = json!({
                "gateway_paced_CPU_per_delivery": {"value": cost, "unit": "µs"},
                "stored_messages_one_recipient": {"value": rate, "unit": "/s"},
                "latency_p99_ms": {"value": 1.0, "unit": "ms"},
            });
            figures.as_object().unwrap().clone()
        };
        let mut figures = Figures::new();
        note(&mut figures, 0, &of(3.0, 50.0), &of(2.0, 100.0));
        let ratios: Vec<_> = figures.values().map(|f| f.ratios[0]).collect();
        assert_eq!(ratios, [1.5, 2.0]);
    }

    #[test]
    fn a_figure_that_one_build_lacks_is_kept_without_a_ratio() {
        let figures = json!({"stored_messages_one_recipient": {"value": 1.0, "unit": "/s"}});
        let (some, none) = (figures.as_object().unwrap(), Map::new());
        for (ours, theirs) in [(some, &none), (&none, some)] {
            let mut figures = Figures::new();
            note(&mut figures, 0, ours, theirs);
            let ratios: Vec<_> = figures.values().map(|f| f.ratios.len()).collect();
            assert_eq!(ratios, [0]);
        }
    }

    #[test]
    fn figures_of_other_servers_are_not_compared() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let (peers, store) = (words("peers --connections 100"), words("store"));
        assert!(counts(&peers, "gateway_paced_CPU_per_delivery"));
        assert!(!counts(&peers, "NATS_paced_CPU_per_delivery"));
        assert!(counts(&store, "stored_messages_one_recipient"));
        assert!(!counts(&store, "latency_p99_ms"));
    }
}
