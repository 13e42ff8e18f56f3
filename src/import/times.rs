//! Refuses times at which nothing can have happened, such as seconds or microseconds instead of milliseconds. Inboxes show
//! times and are in their order, so a wrong one would stay at the top of them.

use anyhow::bail;

use super::lines::{ConversationLine, DeletedLine, Line, MessageLine};
use crate::model::{
    Millis,
    limits::{IMPORT_AHEAD_MAX_MS, IMPORT_TIME_MIN},
};

/// Checks all times of a line.
///
/// # Errors
/// The first impossible time, with its field.
pub(super) fn check(line: &Line, now: Millis) -> anyhow::Result<()> {
    match line {
        Line::Conversation(ConversationLine { at, .. }) => possible("at", *at, now),
        Line::Message(line) => check_message(line, now),
    }
}

fn check_message(line: &MessageLine, now: Millis) -> anyhow::Result<()> {
    possible("at", line.at, now)?;
    possible("edited_at", line.edited_at, now)?;
    if let DeletedLine::By(deletion) = &line.deleted {
        possible("deleted.at", deletion.at, now)?;
    }
    for reaction in &line.reactions {
        possible("reactions.at", reaction.at, now)?;
    }
    Ok(())
}

fn possible(field: &str, at: Option<Millis>, now: Millis) -> anyhow::Result<()> {
    let latest = now.saturating_add(IMPORT_AHEAD_MAX_MS);
    let is_possible = |at: Millis| (IMPORT_TIME_MIN..=latest).contains(&at);
    let Some(at) = at.filter(|at| !is_possible(*at)) else {
        return Ok(());
    };
    let wrong = if at < IMPORT_TIME_MIN {
        "before 1980"
    } else {
        "more than a day after now"
    };
    let units = [
        (at.saturating_mul(1_000), "seconds"),
        (at / 1_000, "microseconds"),
        (at / 1_000_000, "nanoseconds"),
    ];
    let unit = units.iter().find(|(at, _)| is_possible(*at));
    let unit = unit.map_or(String::new(), |(_, unit)| format!(" It looks like {unit}."));
    bail!("{field}: {at} is {wrong}. Times are milliseconds since 1970, UTC.{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Millis = 1_800_000_000_000;

    #[test]
    fn the_bounds_are_possible_and_what_is_beyond_is_not() {
        let latest = NOW + IMPORT_AHEAD_MAX_MS;
        for at in [None, Some(IMPORT_TIME_MIN), Some(NOW), Some(latest)] {
            possible("at", at, NOW).unwrap();
        }
        for (at, wanted) in [
            (
                Millis::MIN,
                "before 1980. Times are milliseconds since 1970, UTC.",
            ),
            (-1, "at: -1 is before 1980."),
            (0, "before 1980"),
            (IMPORT_TIME_MIN - 1, "before 1980"),
            (NOW / 1_000, "It looks like seconds."),
            (
                latest + 1,
                "more than a day after now. Times are milliseconds since 1970, UTC.",
            ),
            (NOW * 1_000, "It looks like microseconds."),
            (NOW * 1_000_000, "It looks like nanoseconds."),
            (Millis::MAX, "more than a day after now"),
        ] {
            let said = possible("at", Some(at), NOW).unwrap_err().to_string();
            assert!(said.contains(wanted), "{at}: {said}");
        }
    }
}
