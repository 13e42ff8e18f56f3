//! The signals that a running gateway gets. None of them ends the process without a drain, except a repeated order to stop.

use std::{io, time::Duration};

use tokio::{
    select,
    signal::unix::{Signal, SignalKind, signal},
    time::Instant,
};

/// The time in which several orders to stop are one: a terminal sends Ctrl-C to all its processes, and some of them pass
/// it on.
const ONE_ORDER: Duration = Duration::from_secs(1);

/// The signals of a gateway. They have their default effect, which ends the process, until this exists.
pub(super) struct Signals {
    stop: [Signal; 3],
    ignored: [(&'static str, Signal); 3],
    /// The time of the first order to stop.
    stopping_since: Option<Instant>,
}

impl Signals {
    /// Catches the signals from now on.
    ///
    /// # Errors
    /// The error of the system.
    pub(super) fn catch() -> io::Result<Self> {
        let caught = |name, kind| io::Result::Ok((name, signal(kind)?));
        Ok(Self {
            stop: [
                signal(SignalKind::terminate())?,
                signal(SignalKind::interrupt())?,
                signal(SignalKind::quit())?,
            ],
            ignored: [
                caught("SIGHUP", SignalKind::hangup())?,
                caught("SIGUSR1", SignalKind::user_defined1())?,
                caught("SIGUSR2", SignalKind::user_defined2())?,
            ],
            stopping_since: None,
        })
    }

    /// Waits for an order to stop. The first call returns at the first one; later calls pass over its repetitions within
    /// [`ONE_ORDER`].
    pub(super) async fn stop(&mut self) {
        loop {
            let [terminate, interrupt, quit] = &mut self.stop;
            let [(hup, hangup), (usr1, user_1), (usr2, user_2)] = &mut self.ignored;
            let ignored = select! {
                _ = terminate.recv() => None,
                _ = interrupt.recv() => None,
                _ = quit.recv() => None,
                _ = hangup.recv() => Some(*hup),
                _ = user_1.recv() => Some(*usr1),
                _ = user_2.recv() => Some(*usr2),
            };
            if let Some(name) = ignored {
                crate::seldom::seldom!(
                    WARN,
                    "ignored a signal: a gateway has nothing to reload; restart it for new settings",
                    signal = name
                );
                continue;
            }
            match self.stopping_since {
                None => {
                    self.stopping_since = Some(Instant::now());
                    return;
                }
                Some(since) if since.elapsed() >= ONE_ORDER => return,
                Some(_) => {}
            }
        }
    }
}
