//! The process that decodes one picture. It limits itself before it reads the first byte.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    process::ExitCode,
};

use rlimit::{Resource, setrlimit};
use rustix::{
    process::{Signal, set_parent_process_death_signal},
    thread::set_no_new_privs,
};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

use super::wire::{self, Job};
use crate::{
    files::process,
    model::limits::{DECODER_BYTES_MAX, DECODER_CPU_MAX_S},
};

/// The process gets the CPU time that nobody else wants, and gives it up at once. With a nice value alone, even 19, the
/// gateway waits until a slice of time is over, and messages take three times as long (`loadtest abuse`).
const SCHEDULE: ThreadSchedulePolicy =
    ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);

/// Decodes the picture of the standard input.
#[must_use]
pub fn main() -> ExitCode {
    match confine().and_then(|()| decode()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Takes from this process what it does not need: memory, time, files, rights, and other processes.
fn confine() -> io::Result<()> {
    // If the machine or the container has no memory left, the system ends this process, not the gateway.
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
    // No program that it could start gets rights that it has not.
    set_no_new_privs(true)?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let _ = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, SCHEDULE);
    let limits = [
        (Resource::AS, DECODER_BYTES_MAX),
        (Resource::CPU, DECODER_CPU_MAX_S),
        (Resource::CORE, 0),
        (Resource::FSIZE, 0),
        (Resource::NPROC, 0),
        // It opens nothing: no file, no socket.
        (Resource::NOFILE, 0),
    ];
    for (resource, limit) in limits {
        setrlimit(resource, limit, limit)?;
    }
    Ok(())
}

fn decode() -> io::Result<()> {
    let mut input = io::stdin().lock();
    let mut header = [0; wire::HEADER_BYTES];
    input.read_exact(&mut header)?;
    let Some(job) = Job::read(&header) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let mut bytes = vec![0; job.length];
    input.read_exact(&mut bytes)?;
    let answer = wire::answer(process(&bytes, job.format, &job.limits));
    io::stdout().write_all(&answer)
}
