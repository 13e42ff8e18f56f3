//! The results of a run. They are printed, compared with goals and with an earlier run, and written as JSON and as an
//! HTML page with plots that needs no server.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use clap::Args;
use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};

use crate::{
    latency::quantile_ms,
    plot::{self, Axis, Line},
};

#[derive(Args, Clone, Default)]
pub(crate) struct Outputs {
    /// File to write the results to, as JSON
    #[arg(long, global = true)]
    json: Option<PathBuf>,
    /// File to write a report with plots to, as one HTML page
    #[arg(long, global = true)]
    html: Option<PathBuf>,
    /// JSON of an earlier run to compare the figures with
    #[arg(long, global = true)]
    compare: Option<PathBuf>,
    /// Fail if a figure, given by its name or the end of its name, is beyond a limit: 'p99_ms>50'; may be repeated
    #[arg(long, global = true, value_parser = Threshold::parse)]
    fail_if: Vec<Threshold>,
    /// Do not fail if a goal for a speed is missed: a time, a rate or CPU. Bounds, as of memory, descriptors and rows, still count,
    /// and so do figures without values, lost messages and --fail-if
    #[arg(long, global = true)]
    no_goals: bool,
}

/// A limit for figures, from --fail-if.
#[derive(Clone, Debug)]
struct Threshold {
    text: String,
    figure: String,
    above: bool,
    limit: f64,
}

impl Threshold {
    fn parse(text: &str) -> anyhow::Result<Self> {
        let at = text
            .find(['<', '>'])
            .context("a limit has the form 'p99_ms>50' or 'deliveries_per_second<1000'")?;
        Ok(Self {
            text: text.to_owned(),
            figure: text[..at].trim().to_owned(),
            above: &text[at..=at] == ">",
            limit: text[at + 1..].trim().parse()?,
        })
    }

    /// Whether the limit applies to a figure: its text is the name, or the end of the name from a separator on.
    fn is_about(&self, name: &str) -> bool {
        name.strip_suffix(&self.figure)
            .is_some_and(|rest| rest.is_empty() || !rest.ends_with(char::is_alphanumeric))
    }
}

/// The figures of one run.
pub(crate) struct Report {
    scenario: &'static str,
    outputs: Outputs,
    /// Name, value and unit.
    figures: Vec<(String, f64, String)>,
    plots: Vec<Plot>,
    /// Missed goals and violated checks.
    missed: Vec<String>,
}

/// One plot.
struct Plot {
    title: String,
    unit: String,
    lines: Vec<Line>,
    axis: Axis,
}

/// The quantiles of a latency plot, denser in the tail.
const QUANTILES: [f64; 16] = [
    0.0, 0.25, 0.5, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999, 0.99999,
    1.0,
];

impl Report {
    pub(crate) fn new(scenario: &'static str, outputs: &Outputs) -> Self {
        Self {
            scenario,
            outputs: outputs.clone(),
            figures: Vec::new(),
            plots: Vec::new(),
            missed: Vec::new(),
        }
    }

    /// Prints and keeps a figure.
    pub(crate) fn figure(&mut self, name: &str, value: f64, unit: &str) {
        println!("  {name:<44} {value:>12.3} {unit}");
        self.keep(name, value, unit);
    }

    fn keep(&mut self, name: &str, value: f64, unit: &str) {
        self.must(value.is_finite(), format!("{name} has no value"));
        let name = name.replace([' ', ':', ','], "_").replace("__", "_");
        self.figures.push((name, value, unit.to_owned()));
    }

    /// Prints, keeps and plots a histogram of microseconds.
    pub(crate) fn latency(&mut self, name: &str, histogram: &Histogram<u64>) {
        if histogram.is_empty() {
            return self.must(false, format!("{name} has no values"));
        }
        let ms = |quantile| quantile_ms(histogram, quantile);
        let (p50, p99, p999) = (ms(0.5), ms(0.99), ms(0.999));
        let max = histogram.max() as f64 / 1000.0;
        println!("  {name:<44} p50 {p50:.2}  p99 {p99:.2}  p99.9 {p999:.2}  max {max:.2} ms");
        for (which, value) in [("p50", p50), ("p99", p99), ("p999", p999), ("max", max)] {
            self.keep(&format!("{name} {which}_ms"), value, "ms");
        }
        let points = QUANTILES.iter().map(|&q| (q, ms(q))).collect();
        let line = Line {
            name: name.to_owned(),
            points,
        };
        self.plot("latency by percentile", "ms", Axis::Percentiles, line);
    }

    /// Plots values over time, in seconds. Values with the same title share a plot.
    pub(crate) fn over_time(
        &mut self,
        title: &str,
        unit: &str,
        name: &str,
        points: Vec<(f64, f64)>,
    ) {
        let name = name.to_owned();
        self.plot(title, unit, Axis::Seconds, Line { name, points });
    }

    /// Plots how a value grows with another one, over powers of ten.
    pub(crate) fn growth(
        &mut self,
        title: &str,
        unit: &str,
        with: &'static str,
        points: Vec<(f64, f64)>,
    ) {
        let name = unit.to_owned();
        self.plot(title, unit, Axis::Powers(with), Line { name, points });
    }

    fn plot(&mut self, title: &str, unit: &str, axis: Axis, line: Line) {
        if let Some(plot) = self.plots.iter_mut().find(|p| p.title == title) {
            plot.lines.push(line);
        } else {
            self.plots.push(Plot {
                title: title.to_owned(),
                unit: unit.to_owned(),
                lines: vec![line],
                axis,
            });
        }
    }

    /// Prints and keeps a figure with a bound: at most `most`.
    pub(crate) fn at_most(&mut self, name: &str, value: f64, most: f64, unit: &str) {
        self.figure(name, value, unit);
        let missed = format!("{name} is {value:.3} {unit}, more than {most}");
        self.bound(value <= most, format!("at most {most} {unit}"), missed);
    }

    /// Prints and keeps a figure with a bound: at least `least`.
    pub(crate) fn at_least(&mut self, name: &str, value: f64, least: f64, unit: &str) {
        self.figure(name, value, unit);
        let missed = format!("{name} is {value:.3} {unit}, less than {least}");
        self.bound(value >= least, format!("at least {least} {unit}"), missed);
    }

    /// The same as [`Self::at_most`] for a speed, which depends on the machine: it does not count with --no-goals.
    pub(crate) fn speed_at_most(&mut self, name: &str, value: f64, most: f64, unit: &str) {
        if self.outputs.no_goals {
            self.figure(name, value, unit);
        } else {
            self.at_most(name, value, most, unit);
        }
    }

    /// The same as [`Self::at_least`] for a speed.
    pub(crate) fn speed_at_least(&mut self, name: &str, value: f64, least: f64, unit: &str) {
        if self.outputs.no_goals {
            self.figure(name, value, unit);
        } else {
            self.at_least(name, value, least, unit);
        }
    }

    fn bound(&mut self, reached: bool, goal: String, missed: String) {
        let said = if reached { "reached" } else { "MISSED" };
        println!("  {:<44} {goal}: {said}", "goal");
        if !reached {
            self.missed.push(missed);
        }
    }

    /// Fails the run with this text unless `holds`, also with --no-goals.
    pub(crate) fn must(&mut self, holds: bool, text: String) {
        if !holds {
            println!("  WRONG: {text}");
            self.missed.push(text);
        }
    }

    /// Compares and writes the results. True if nothing was missed.
    pub(crate) fn finish(mut self) -> anyhow::Result<bool> {
        let earlier = match &self.outputs.compare {
            Some(path) => Some(earlier(path)?),
            None => None,
        };
        if let Some(earlier) = &earlier {
            self.tell_ratios(earlier);
        }
        self.check_thresholds()?;
        let passed = self.missed.is_empty();
        if let Some(path) = &self.outputs.json {
            write(path, &self.json(passed)?)?;
        }
        if let Some(path) = &self.outputs.html {
            write(path, &self.page(earlier.as_ref())?)?;
            println!("report: {}", path.display());
        }
        for missed in &self.missed {
            println!("missed: {missed}");
        }
        println!(
            "{}: {}",
            self.scenario,
            if passed { "passed" } else { "failed" }
        );
        Ok(passed)
    }

    fn tell_ratios(&self, earlier: &Map<String, Value>) {
        println!("compared with the earlier run:");
        for (name, value, unit) in &self.figures {
            if let Some(before) = earlier.get(name).and_then(|f| f["value"].as_f64()) {
                let ratio = value / before;
                println!("  {name:<60} {before:>12.3} → {value:>12.3} {unit:<4} × {ratio:.2}");
            }
        }
    }

    /// Compares the figures with the thresholds of `--fail-if`.
    fn check_thresholds(&mut self) -> anyhow::Result<()> {
        for threshold in &self.outputs.fail_if {
            let about = self
                .figures
                .iter()
                .filter(|(name, ..)| threshold.is_about(name));
            let about: Vec<_> = about.collect();
            if about.is_empty() {
                bail!(
                    "--fail-if {:?}: no figure has this name; --json lists the names",
                    threshold.text
                );
            }
            for (name, value, unit) in about {
                let fails = if threshold.above {
                    *value > threshold.limit
                } else {
                    *value < threshold.limit
                };
                if fails {
                    self.missed
                        .push(format!("{name} is {value:.3} {unit}: {}", threshold.text));
                }
            }
        }
        Ok(())
    }

    fn json(&self, passed: bool) -> anyhow::Result<String> {
        let figures: Map<String, Value> = self
            .figures
            .iter()
            .map(|(name, value, unit)| (name.clone(), json!({"value": value, "unit": unit})))
            .collect();
        let result = json!({
            "scenario": self.scenario, "results": figures, "missed": self.missed, "passed": passed,
        });
        Ok(serde_json::to_string_pretty(&result)?)
    }

    fn page(&self, earlier: Option<&Map<String, Value>>) -> anyhow::Result<String> {
        let mut rows = String::new();
        for (name, value, unit) in &self.figures {
            let before = earlier
                .and_then(|earlier| earlier.get(name)?["value"].as_f64())
                .map_or(String::new(), |b| format!("{b:.3} (× {:.2})", value / b));
            rows += &format!(
                "<tr><td>{}</td><td>{value:.3}</td><td>{}</td><td>{before}</td></tr>\n",
                plot::escaped(name),
                plot::escaped(unit)
            );
        }
        let missed: String = self
            .missed
            .iter()
            .map(|m| format!("<li>{}</li>", plot::escaped(m)))
            .collect();
        let mut pictures = String::new();
        for plot in &self.plots {
            let svg = plot.axis.draw(&plot.unit, &plot.lines)?;
            pictures += &format!(
                "<figure><figcaption>{}</figcaption>{svg}</figure>\n",
                plot::escaped(&plot.title)
            );
        }
        let verdict = if self.missed.is_empty() {
            "passed"
        } else {
            "failed"
        };
        Ok(format!(
            "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>loadtest {scenario}</title>\
             <meta name=\"viewport\" content=\"width=device-width\"><style>{STYLE}</style>\
             <h1>loadtest {scenario}: <span class=\"{verdict}\">{verdict}</span></h1><ul>{missed}</ul>\n\
             <main>{pictures}</main>\n<table><tr><th>figure</th><th>value</th><th></th><th>earlier</th></tr>\n{rows}</table></html>\n",
            scenario = self.scenario,
        ))
    }
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2rem auto;padding:0 1rem;color:#1b2130;background:#fff}\
    h1{font-size:1.5rem}.passed{color:#1a7f4b}.failed{color:#b3261e}\
    main{display:grid;grid-template-columns:repeat(auto-fit,minmax(520px,1fr));gap:1rem}\
    figure{margin:0;border:1px solid #dde1ea;border-radius:10px;padding:.8rem}figcaption{font-weight:600}svg{width:100%;height:auto}\
    table{border-collapse:collapse;margin-top:1.5rem;width:100%}td,th{text-align:left;padding:.2rem .6rem;border-bottom:1px solid #e7eaf1}\
    td:nth-child(2){text-align:right;font-variant-numeric:tabular-nums}";

fn earlier(path: &Path) -> anyhow::Result<Map<String, Value>> {
    let text = fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    let mut result: Value = serde_json::from_str(&text)?;
    match result["results"].take() {
        Value::Object(figures) => Ok(figures),
        _ => bail!(
            "--compare {}: the file has no results of this program",
            path.display()
        ),
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("{}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spread::Spread;

    #[test]
    fn a_limit_applies_to_a_whole_name_or_its_end() {
        let threshold = Threshold::parse("p99_ms>50").unwrap();
        assert!(threshold.above && (threshold.limit - 50.0).abs() < f64::EPSILON);
        assert!(threshold.is_about("p99_ms"));
        assert!(threshold.is_about("gateway_paced_latency_p99_ms"));
        assert!(!threshold.is_about("gateway_xp99_ms"));
        assert!(!threshold.is_about("p999_ms"));
        assert!(Threshold::parse("p99_ms").is_err());
    }

    #[test]
    fn the_page_has_its_plots_and_loads_nothing() {
        let mut report = Report::new("test", &Outputs::default());
        let mut histogram = Histogram::new_with_max(1_000_000, 3).unwrap();
        (1..1000).for_each(|n| histogram.saturating_record(n));
        report.latency("<b>latency", &histogram);
        report.over_time("memory", "MiB", "server", vec![(0.0, 1.0), (1.0, 2.0)]);
        let page = report.page(None).unwrap();
        assert_eq!(page.matches("<svg").count(), 2);
        assert!(page.contains("&lt;b&gt;latency_p99_ms") && page.contains("99.9"));
        assert!(!page.contains("<b>") && !page.contains("src=") && !page.contains("href="));
    }

    #[test]
    fn a_figure_beyond_its_limit_fails_the_run() {
        let outputs = |text: &str| Outputs {
            fail_if: vec![Threshold::parse(text).unwrap()],
            ..Outputs::default()
        };
        for (text, passes) in [
            ("cost>2", true),
            ("cost>1", false),
            ("cost<1", true),
            ("cost<2", false),
        ] {
            let mut report = Report::new("test", &outputs(text));
            report.figure("gateway cost", 1.5, "µs");
            assert_eq!(report.finish().unwrap(), passes, "{text}");
        }
        let report = Report::new("test", &outputs("nothing>1"));
        assert!(report.finish().is_err());
    }

    #[test]
    fn without_goals_only_speeds_do_not_count() {
        type Judge = fn(&mut Report, &str, f64, f64, &str);
        let judges: [(Judge, f64, bool); 4] = [
            (Report::at_most, 2.0, false),
            (Report::at_least, 0.5, false),
            (Report::speed_at_most, 2.0, true),
            (Report::speed_at_least, 0.5, true),
        ];
        for (number, (judge, beyond, is_speed)) in judges.into_iter().enumerate() {
            for no_goals in [false, true] {
                let outputs = Outputs {
                    no_goals,
                    ..Outputs::default()
                };
                let passes = |value: f64| {
                    let mut report = Report::new("test", &outputs);
                    judge(&mut report, "cost", value, 1.0, "");
                    report.finish().unwrap()
                };
                assert!(passes(1.0), "{number}");
                assert_eq!(passes(beyond), is_speed && no_goals, "{number}");
                assert!(!passes(f64::NAN), "{number}");
            }
        }
    }

    #[test]
    fn a_figure_without_values_fails_the_run() {
        let outputs = Outputs {
            no_goals: true,
            ..Outputs::default()
        };
        let passes = |tell: fn(&mut Report)| {
            let mut report = Report::new("test", &outputs);
            tell(&mut report);
            report.finish().unwrap()
        };
        assert!(passes(|report| report.figure("cost", 0.0, "")));
        assert!(!passes(|report| report.figure("cost", f64::NAN, "")));
        assert!(!passes(
            |report| report.latency("latency", &Histogram::new(3).unwrap())
        ));
        assert!(!passes(
            |report| Spread::of(Vec::new()).tell(report, "cost", "")
        ));
    }
}
