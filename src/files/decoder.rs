//! Decodes each picture in a process of its own. A decoder allocates more than the pixels, and how much the bytes of a
//! picture decide; so the system limits the process, and a picture that needs more ends it and nothing else.
//!
//! The process is this program again, with the argument [`DECODER_ARGUMENT`]. It reads a [`Job`] from its standard input
//! and writes an answer to its standard output, both with numbers in big endian.

mod child;
mod wire;

use std::{
    io,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
};

use rustix::{io::Errno, process::Signal};
use thiserror::Error;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, Command},
    time::timeout,
};

use super::{Format, ImageLimits, Processed};
use crate::model::limits::DECODER_TIME_MAX;

pub use child::main as decoder_main;

/// The first argument of a process that decodes a picture.
pub const DECODER_ARGUMENT: &str = "decode-picture";

/// This program. It is the same one also after its file was replaced.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// The settings of the allocator of the process, which give memory back as soon as it is free.
const ALLOCATOR: (&str, &str) = (
    "_RJEM_MALLOC_CONF",
    "narenas:1,tcache:false,retain:false,dirty_decay_ms:0,muzzy_decay_ms:0",
);

/// Why a picture was not decoded.
#[derive(Debug, Error)]
pub enum DecoderError {
    /// The picture is above a limit, or cannot be decoded.
    #[error("{0}")]
    Refused(String),
    /// The process ended without an answer: it needed too much memory or CPU time.
    #[error("the decoder ended without an answer ({0})")]
    Ended(ExitStatus),
    #[error("the decoder did not answer in {} s", DECODER_TIME_MAX.as_secs())]
    Slow,
    #[error("the answer of the decoder is wrong: {0}")]
    WrongAnswer(&'static str),
    #[error("the decoder could not be started: {0}")]
    NotStarted(io::Error),
    /// Someone ended the process with a signal, as when the machine stops. It says nothing of the picture.
    #[error("the decoder was told to end")]
    Interrupted,
}

impl DecoderError {
    /// Returns whether the machine had no room for the process: no memory, processes, descriptors or CPU time. That says
    /// nothing of the picture, and may be over soon.
    #[must_use]
    pub fn is_of_machine(&self) -> bool {
        let error = match self {
            Self::NotStarted(error) => error,
            // A picture that needs long ends its process at the limit of CPU time, which is shorter.
            Self::Slow => return true,
            _ => return false,
        };
        let Some(errno) = Errno::from_io_error(error) else {
            return false;
        };
        [Errno::AGAIN, Errno::NOMEM, Errno::MFILE, Errno::NFILE].contains(&errno)
    }
}

/// Decodes a picture and makes its thumbnail in a process of its own, which ends with this future.
///
/// # Errors
/// The reason why there is no thumbnail.
pub async fn decode(
    bytes: &[u8],
    format: Format,
    limits: &ImageLimits,
) -> Result<Processed, DecoderError> {
    let mut child = start().map_err(DecoderError::NotStarted)?;
    let answered = timeout(DECODER_TIME_MAX, answer(&mut child, bytes, format, limits));
    match answered.await {
        Ok(Ok((status, answer))) => read(status, &answer, limits),
        broken => {
            // The place of this process is free when it is gone.
            let _ = child.kill().await;
            match broken {
                Ok(Err(error)) => Err(DecoderError::NotStarted(error)),
                _ => Err(DecoderError::Slow),
            }
        }
    }
}

fn start() -> io::Result<Child> {
    let this = Path::new(THIS_PROGRAM);
    let program = if this.exists() {
        PathBuf::from(this)
    } else {
        std::env::current_exe()?
    };
    Command::new(program)
        .arg0(env!("CARGO_PKG_NAME"))
        .arg(DECODER_ARGUMENT)
        // Nothing of the gateway's secrets.
        .env_clear()
        .env(ALLOCATOR.0, ALLOCATOR.1)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        // The signals of a terminal are for the gateway, which ends the process itself.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
}

/// Sends a picture to the process and waits for its end. Returns how it ended, and its answer.
async fn answer(
    child: &mut Child,
    bytes: &[u8],
    format: Format,
    limits: &ImageLimits,
) -> io::Result<(ExitStatus, Vec<u8>)> {
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let (mut stdin, stdout) = stdin.zip(stdout).ok_or(io::ErrorKind::BrokenPipe)?;
    let header = wire::Job::new(format, limits, bytes).header();
    let sent = async move {
        // A process that ended does not read; its status says why.
        if stdin.write_all(&header).await.is_ok() {
            let _ = stdin.write_all(bytes).await;
        }
    };
    let mut answer = Vec::new();
    // One byte more shows that there is more.
    let mut stdout = stdout.take(wire::answer_max(limits) + 1);
    let received = stdout.read_to_end(&mut answer);
    let (_, received) = futures_util::future::join(sent, received).await;
    received?;
    if answer.len() as u64 > wire::answer_max(limits) {
        child.start_kill()?;
    }
    Ok((child.wait().await?, answer))
}

fn read(
    status: ExitStatus,
    answer: &[u8],
    limits: &ImageLimits,
) -> Result<Processed, DecoderError> {
    let told = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];
    if told
        .map(|signal| Some(signal.as_raw()))
        .contains(&status.signal())
    {
        return Err(DecoderError::Interrupted);
    }
    if answer.len() as u64 > wire::answer_max(limits) {
        return Err(DecoderError::WrongAnswer("it is too long"));
    }
    if !status.success() {
        return Err(DecoderError::Ended(status));
    }
    match wire::read_answer(answer, limits) {
        Ok(Ok(processed)) => Ok(processed),
        Ok(Err(text)) => Err(DecoderError::Refused(text)),
        Err(text) => Err(DecoderError::WrongAnswer(text)),
    }
}
