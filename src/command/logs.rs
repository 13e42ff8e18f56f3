//! `chat-gateway store`: checks and mends the logs of a conversation.

use std::process::ExitCode;

use clap::Subcommand;

use crate::{config::Config, mend, model::ConversationId};

#[derive(Subcommand)]
pub(super) enum Command {
    /// Read the logs of a conversation, and say which entries and changes are missing; exit with 1 if there are any
    Check { conversation: ConversationId },
    /// Let a conversation go on whose log has lost entries: they become deleted messages; no gateway may be running on the
    /// store
    Mend { conversation: ConversationId },
}

pub(super) async fn run(config: &Config, command: &Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Check { conversation } => {
            let report = mend::check(config, *conversation).await?;
            print!("{report}");
            if report.is_whole() {
                println!("nothing is missing");
                return Ok(ExitCode::SUCCESS);
            }
            println!(
                "to let the conversation go on: stop all gateways, then run chat-gateway store mend {conversation}. Missing \
                 messages then show as deleted, and all others stay at their places"
            );
            Ok(ExitCode::FAILURE)
        }
        Command::Mend { conversation } => {
            let report = mend::mend(config, *conversation).await?;
            print!("{report}");
            if report.is_whole() {
                println!("nothing is missing, and nothing was changed");
            } else {
                println!("mended: what was missing is filled, and the conversation can go on");
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}
