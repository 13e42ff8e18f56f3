//! Services around the messages: uploads, webhooks and push.

pub(crate) mod attachments;
mod consumers;

use clap::Subcommand;

use crate::Common;

/// The scenarios of this folder.
#[derive(Subcommand)]
pub(crate) enum Scenario {
    /// Measure uploads of files, what they cost people who talk meanwhile, and whether deleted files are gone
    Attachments(attachments::Options),
    /// Measure what webhooks cost, and how old events are when they arrive; kill the gateway, and look for each of them
    Consumers(consumers::Options),
}

impl Scenario {
    pub(crate) fn run(&self, common: &Common) -> anyhow::Result<bool> {
        match self {
            Self::Attachments(options) => attachments::run(common, options),
            Self::Consumers(options) => consumers::run(common, options),
        }
    }
}
