//! Results: printed, compared with their goals, and written as JSON.

use std::{fs, path::Path};

use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};

/// The figures of one run.
pub(crate) struct Report {
    scenario: &'static str,
    results: Map<String, Value>,
    missed: Vec<String>,
    goals: bool,
}

impl Report {
    pub(crate) fn new(scenario: &'static str, goals: bool) -> Self {
        Self {
            scenario,
            results: Map::new(),
            missed: Vec::new(),
            goals,
        }
    }

    pub(crate) fn figure(&mut self, name: &str, value: f64, unit: &str) {
        println!("  {name:<44} {value:>12.3} {unit}");
        self.results.insert(
            name.replace(' ', "_"),
            json!({"value": value, "unit": unit}),
        );
    }

    pub(crate) fn latency(&mut self, name: &str, histogram: &Histogram<u64>) {
        let ms = |quantile| histogram.value_at_quantile(quantile) as f64 / 1000.0;
        let (p50, p99, p999) = (ms(0.5), ms(0.99), ms(0.999));
        let max = histogram.max() as f64 / 1000.0;
        println!("  {name:<44} p50 {p50:.2}  p99 {p99:.2}  p99.9 {p999:.2}  max {max:.2} ms");
        self.results.insert(
            name.replace(' ', "_"),
            json!({"p50_ms": p50, "p99_ms": p99, "p999_ms": p999, "max_ms": max}),
        );
    }

    /// A figure that may be at most `most`.
    pub(crate) fn at_most(&mut self, name: &str, value: f64, most: f64, unit: &str) {
        self.figure(name, value, unit);
        let missed = format!("{name} is {value:.3} {unit}, more than {most}");
        self.goal(value <= most, format!("at most {most} {unit}"), missed);
    }

    /// A figure that must be at least `least`.
    pub(crate) fn at_least(&mut self, name: &str, value: f64, least: f64, unit: &str) {
        self.figure(name, value, unit);
        let missed = format!("{name} is {value:.3} {unit}, less than {least}");
        self.goal(value >= least, format!("at least {least} {unit}"), missed);
    }

    fn goal(&mut self, reached: bool, goal: String, missed: String) {
        if !self.goals {
            return;
        }
        let said = if reached { "reached" } else { "MISSED" };
        println!("  {:<44} {goal}: {said}", "goal");
        if !reached {
            self.missed.push(missed);
        }
    }

    /// What may never be otherwise.
    pub(crate) fn must(&mut self, holds: bool, text: String) {
        if !holds {
            println!("  WRONG: {text}");
            self.missed.push(text);
        }
    }

    /// True if nothing was missed.
    pub(crate) fn finish(self, json: Option<&Path>) -> anyhow::Result<bool> {
        let passed = self.missed.is_empty();
        if let Some(path) = json {
            let result = json!({
                "scenario": self.scenario, "results": self.results, "missed": self.missed, "passed": passed,
            });
            fs::write(path, serde_json::to_string_pretty(&result)?)?;
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
}
