//! Checks in the end that every reaction is there once: in the list of who reacted, in the message of a page, and in the
//! last state of each subscriber.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::{
    Done,
    reactors::Plan,
    watchers::{Counts, Reactions, reactions},
};
use crate::{client::Client, report::Report, server::Server, store::celebrity::OWNER};

/// Users of the largest page of reactions.
const PAGE: u64 = 500;
/// Pages read beyond those that the reactions fill. More would be without end.
const PAGES_SPARE: u64 = 1_000;

pub(super) struct Verification<'a> {
    pub(super) plan: &'a Plan,
    /// Reactions that were asked for.
    pub(super) asked: u64,
    pub(super) done: Done,
    pub(super) counts: Counts,
    /// The last state of each subscriber.
    pub(super) last_states: Vec<Arc<Reactions>>,
}

/// Users and emoji, with the number of times that each pair is listed.
type Listed = HashMap<(String, String), u64>;

impl Verification<'_> {
    pub(super) fn run(&self, servers: &[Server], report: &mut Report) -> anyhow::Result<()> {
        let mut owner = Client::connect(&servers[0].address, OWNER, 0)?;
        let summary = self.summary(&mut owner)?;
        let listed = self.listed(&mut owner)?;
        self.judge_answers(report);
        self.judge_list(report, &listed);
        let mut counted = Reactions::new();
        for ((_, emoji), times) in &listed {
            *counted.entry(emoji.clone()).or_default() += times;
        }
        report.must(
            counted == summary,
            format!("the message has {summary:?}, but the lists of who reacted have {counted:?}"),
        );
        let wrong = self.last_states.iter().filter(|state| ***state != summary);
        let wrong = wrong.count();
        println!(
            "  of {} subscribers {wrong} have another last state than the store; {} gaps, {} of {} `reacted` events",
            self.last_states.len(),
            self.counts.gaps,
            self.counts.reacted,
            self.reactions_of_subscribers(),
        );
        report.must(
            wrong == 0,
            format!("{wrong} subscribers have not the newest state"),
        );
        let Counts {
            refused, closed, ..
        } = self.counts;
        report.must(
            refused + closed == 0,
            format!("{refused} requests of subscribers were refused, {closed} connections closed"),
        );
        Ok(())
    }

    /// Reads the reactions of the message from a page.
    fn summary(&self, owner: &mut Client) -> anyhow::Result<Reactions> {
        let Plan {
            conversation, seq, ..
        } = self.plan;
        let page =
            json!({"type": "history", "conversation": conversation, "before": seq + 1, "limit": 1});
        let page = owner.ask(page)?;
        let entry = &page["messages"][0];
        ensure!(entry["seq"] == *seq, "the page lacks message {seq}: {page}");
        reactions(entry)
    }

    /// Reads all pages of who reacted.
    fn listed(&self, owner: &mut Client) -> anyhow::Result<Listed> {
        let Plan {
            conversation, seq, ..
        } = self.plan;
        let mut listed = Listed::new();
        let mut after = Value::Null;
        for _ in 0..self.asked / PAGE + PAGES_SPARE {
            let mut request = json!({"type": "reactions", "conversation": conversation, "seq": seq, "limit": PAGE});
            if !after.is_null() {
                request["after"] = after;
            }
            let mut page = owner.ask(request)?;
            for item in page["items"].as_array().context("a page has no items")? {
                let of = |name: &str| item[name].as_str().unwrap_or_default().to_owned();
                *listed.entry((of("user"), of("emoji"))).or_default() += 1;
            }
            after = page["next"].take();
            if after.is_null() {
                return Ok(listed);
            }
        }
        anyhow::bail!("the pages of who reacted have no end")
    }

    fn judge_answers(&self, report: &mut Report) {
        let Done {
            acknowledged,
            refused,
            refusal,
            ..
        } = &self.done;
        println!(
            "  {} reactions, {acknowledged} acknowledged, {} refused",
            self.asked,
            refused.len()
        );
        report.must(
            *acknowledged == self.asked,
            format!(
                "{} reactions were refused, the first with: {}",
                refused.len(),
                refusal.as_deref().unwrap_or_default()
            ),
        );
    }

    /// Compares the list with the reactions. One that was refused may be listed.
    fn judge_list(&self, report: &mut Report, listed: &Listed) {
        let refused: HashSet<u64> = self.done.refused.iter().copied().collect();
        let (mut lost, mut known) = (0, 0);
        for number in 0..self.asked {
            let (user, emoji) = self.plan.reaction(number);
            match listed.contains_key(&(user, emoji.to_owned())) {
                true => known += 1,
                false => lost += u64::from(!refused.contains(&number)),
            }
        }
        let doubled = listed.values().sum::<u64>() - known;
        println!("  {known} reactions are listed, {lost} lost, {doubled} doubled or of nobody");
        report.must(
            lost + doubled == 0,
            format!("{lost} reactions were lost, {doubled} doubled"),
        );
    }

    /// Subscribers are the first users, so this many reactions were theirs.
    fn reactions_of_subscribers(&self) -> u64 {
        let (users, subscribers) = (self.plan.users(), self.last_states.len() as u64);
        self.asked / users * subscribers + (self.asked % users).min(subscribers)
    }
}
