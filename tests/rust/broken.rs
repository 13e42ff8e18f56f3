//! Rules that are broken on purpose. A simulation must find each of them, for the right reason.

use std::{fmt::Debug, ops::Range};

/// Tries one seed after the other until the broken rule is found, and prints what that took.
///
/// `run` runs a seed with the rule broken (`true`) or kept (`false`), and returns the findings. `kinds` are the expected
/// findings: one of those of the seed must contain one of these texts.
///
/// # Errors
/// No seed finds the rule, the first one that finds something finds nothing that is expected, or the same seed finds
/// something while the rule is kept.
pub(crate) fn find(
    rule: impl Debug,
    seeds: Range<u64>,
    kinds: &[&str],
    run: impl Fn(u64, bool) -> Vec<String>,
) -> Result<(), String> {
    let found = try_each(seeds, kinds, run);
    match &found {
        Ok(found) | Err(found) => println!("broken rule {rule:?}: {found}"),
    }
    found
        .map(drop)
        .map_err(|failed| format!("broken rule {rule:?}: {failed}"))
}

fn try_each(
    seeds: Range<u64>,
    kinds: &[&str],
    run: impl Fn(u64, bool) -> Vec<String>,
) -> Result<String, String> {
    let Some((seed, findings)) = seeds.clone().find_map(|seed| {
        let findings = run(seed, true);
        (!findings.is_empty()).then_some((seed, findings))
    }) else {
        return Err(format!("not found by the seeds {seeds:?}"));
    };
    let is_expected = |finding: &&String| kinds.iter().any(|kind| finding.contains(kind));
    let Some(finding) = findings.iter().find(is_expected) else {
        return Err(format!(
            "seed {seed}: expected one of {kinds:?}, found {findings:#?}"
        ));
    };
    let kept = run(seed, false);
    if !kept.is_empty() {
        return Err(format!(
            "seed {seed}: found while the rule is kept: {kept:#?}"
        ));
    }
    let tried = seed - seeds.start + 1;
    Ok(format!("found at seed {seed}, {tried} tried: {finding}"))
}

/// Fails if a rule was not found as expected, and says which.
pub(crate) fn require(found: impl IntoIterator<Item = Result<(), String>>) {
    let failed: Vec<String> = found.into_iter().filter_map(Result::err).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn a_broken_rule_is_found_only_for_an_expected_reason_and_not_while_it_is_kept() {
    let seeds = |seed, is_broken| match (seed, is_broken) {
        (3, true) => vec!["something else".to_owned(), "lost: 5".to_owned()],
        (4, _) => vec!["lost: 6".to_owned()],
        _ => Vec::new(),
    };
    assert_eq!(find("a", 0..5, &["lost"], seeds), Ok(()));
    let failed = |seeds_from, kind| find("a", seeds_from..5, &[kind], seeds).unwrap_err();
    assert!(failed(0, "twice").contains("expected one of"));
    assert!(failed(4, "lost").contains("while the rule is kept"));
    let none = find("a", 0..3, &["lost"], seeds).unwrap_err();
    assert!(none.contains("not found by the seeds 0..3"));
}
