//! Which users an operation brings into the conversation, so that they must have room in their inbox: see `inbox_limits.rs`.

use std::collections::VecDeque;

use super::{Command, Owner};
use crate::{
    chat::{
        error::Error,
        operation::Operation,
        participants::{CheckedChange, Participants, check_creation},
    },
    model::{Kind, SystemChange, UserId},
};

impl Owner {
    /// Returns the users whose inbox gets a new row by the command. `None` if there are none, if it is known that they have
    /// room, or if the command is refused anyway.
    pub(super) fn newcomers(&self, command: &Command) -> Option<Vec<UserId>> {
        let settings = &self.environment.settings;
        settings.conversations_per_user_max?;
        if command.newcomers_fit {
            return None;
        }
        let max = settings.group_participants_max;
        match (&command.operation, &self.participants) {
            (Operation::Create(creation), None) if creation.kind != Kind::Dm => {
                match check_creation(&command.actor, creation, max) {
                    Ok(SystemChange::Created { participants, .. }) => Some(participants),
                    _ => None,
                }
            }
            (Operation::Add { .. } | Operation::Join, Some(participants)) => {
                let user = entering(participants, command, max)?;
                // The row of a former participant is still there.
                (!participants.was_in(&user)).then(|| vec![user])
            }
            // The rows of a dm are written with its first message. A message that is refused anyway tells nobody who has no room.
            (Operation::Send(draft), Some(participants))
                if participants.details.kind == Kind::Dm
                    && self.log.next() == 1
                    && participants.check_posting(&draft.sender).is_ok()
                    && self.check_content(&draft.content).is_ok() =>
            {
                Some(participants.users())
            }
            _ => None,
        }
    }

    /// Notes that these users have room, or refuses the commands that bring them in because `full` has none.
    pub(super) fn found_full(
        &self,
        users: &[UserId],
        full: Option<&UserId>,
        commands: &mut VecDeque<Command>,
    ) {
        let max = self.environment.settings.conversations_per_user_max;
        let refused = full.map(|user| Error::TooLarge {
            what: format!("conversations of {user}").into(),
            max: max.unwrap_or(usize::MAX),
        });
        let mut take_places = full.is_none();
        for mut command in std::mem::take(commands) {
            let asked = self.newcomers(&command).is_some_and(|new| new == users);
            if asked && std::mem::take(&mut take_places) {
                self.environment.inbox_limits.take_places(users);
            }
            match &refused {
                Some(error) if asked => drop(command.reply.send(Err(error.clone()))),
                _ => {
                    command.newcomers_fit |= asked;
                    commands.push_back(command);
                }
            }
        }
    }
}

/// Returns the user who enters the conversation by an operation.
fn entering(participants: &Participants, command: &Command, max: usize) -> Option<UserId> {
    let checked = participants.check_change(&command.actor, &command.operation, max);
    match checked {
        Ok(CheckedChange::New(SystemChange::Added { user })) => Some(user),
        Ok(CheckedChange::New(SystemChange::Joined)) => Some(command.actor.clone()),
        _ => None,
    }
}
