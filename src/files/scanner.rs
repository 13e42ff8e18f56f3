//! Asks clamd whether a file is malicious, by its command INSTREAM
//! (<https://docs.clamav.net/manual/Usage/Scanning.html#clamd>).

use std::{fmt, io, path::PathBuf, str::FromStr, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpStream, UnixStream},
    time::timeout,
};

/// Bytes that are sent at once.
const PART_BYTES: usize = 64 << 10;
/// The longest answer that is read. clamd names the signature in it.
const ANSWER_BYTES_MAX: usize = 1_024;
/// The time within which clamd takes a connection, or a part of a file.
const PART_TIMEOUT: Duration = Duration::from_secs(10);
/// The time within which clamd answers once it has the whole file. Archives take it long.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(180);

/// The address of clamd: `host:port`, or `unix:` and a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Scanner {
    Tcp(String),
    Unix(PathBuf),
}

/// What clamd says of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    Clean,
    /// It is malicious. The text is the name of the signature.
    Found(String),
    /// clamd takes no files of this size (`StreamMaxLength`).
    TooLarge,
}

/// Why a file was not scanned.
#[derive(Debug, thiserror::Error)]
pub enum NotScanned {
    #[error("the file cannot be read: {0}")]
    File(io::Error),
    #[error(transparent)]
    Scanner(#[from] io::Error),
}

impl FromStr for Scanner {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.starts_with('/') {
                Ok(Self::Unix(path.into()))
            } else {
                Err("the path after unix: must begin with /")
            };
        }
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Tcp(text.to_owned()))
            }
            _ => Err("must be host:port or unix:/path"),
        }
    }
}

impl fmt::Display for Scanner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Scanner {
    /// Sends a file to clamd, and returns its answer.
    ///
    /// # Errors
    /// The error of the file or of the connection; `TimedOut` if clamd takes too long; `Other` with what clamd says if it
    /// could not scan.
    pub async fn scan(&self, file: impl AsyncRead + Unpin) -> Result<Verdict, NotScanned> {
        match self {
            Self::Tcp(address) => {
                let stream = in_time(PART_TIMEOUT, TcpStream::connect(address)).await?;
                ask(stream, file).await
            }
            Self::Unix(path) => {
                let stream = in_time(PART_TIMEOUT, UnixStream::connect(path)).await?;
                ask(stream, file).await
            }
        }
    }
}

async fn in_time<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(limit, work).await.map_err(io::Error::from)?
}

async fn ask(
    stream: impl AsyncRead + AsyncWrite,
    file: impl AsyncRead + Unpin,
) -> Result<Verdict, NotScanned> {
    let (answers, mut parts) = tokio::io::split(stream);
    let sent = match send(&mut parts, file).await {
        // clamd waits for the rest, so it would not answer.
        Err(error @ NotScanned::File(_)) => return Err(error),
        // clamd answers before the end of a file that is too large, and then closes the connection.
        sent => sent,
    };
    let mut answer = Vec::new();
    let mut answers = answers.take(ANSWER_BYTES_MAX as u64);
    let read = answers.read_to_end(&mut answer);
    let read = in_time(ANSWER_TIMEOUT, read).await;
    if let Some(verdict) = understood(&String::from_utf8_lossy(&answer))? {
        return Ok(verdict);
    }
    sent?;
    read?;
    let text = "clamd closed the connection without an answer";
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, text).into())
}

async fn send(
    parts: &mut (impl AsyncWrite + Unpin),
    mut file: impl AsyncRead + Unpin,
) -> Result<(), NotScanned> {
    in_time(PART_TIMEOUT, parts.write_all(b"zINSTREAM\0")).await?;
    let mut part = vec![0; PART_BYTES];
    loop {
        let read = file.read(&mut part).await.map_err(NotScanned::File)?;
        let len = u32::try_from(read).map_err(io::Error::other)?;
        // A part without bytes is the end.
        in_time(PART_TIMEOUT, async {
            parts.write_all(&len.to_be_bytes()).await?;
            parts.write_all(&part[..read]).await
        })
        .await?;
        if read == 0 {
            return Ok(in_time(PART_TIMEOUT, parts.flush()).await?);
        }
    }
}

/// Reads an answer. `None` if there is none.
fn understood(answer: &str) -> io::Result<Option<Verdict>> {
    let answer = answer.trim_end_matches(['\0', '\n']);
    if answer.is_empty() {
        return Ok(None);
    }
    let said = answer.strip_prefix("stream: ").unwrap_or(answer);
    if said == "OK" {
        Ok(Some(Verdict::Clean))
    } else if let Some(name) = said.strip_suffix(" FOUND") {
        Ok(Some(Verdict::Found(name.to_owned())))
    } else if said.contains("size limit exceeded") {
        Ok(Some(Verdict::TooLarge))
    } else {
        Err(io::Error::other(format!("clamd says: {said}")))
    }
}

#[cfg(test)]
mod tests {
    use tokio_util::io::StreamReader;

    use super::*;

    #[test]
    fn addresses_are_checked() {
        let tcp: Scanner = "clamd.example:3310".parse().unwrap();
        assert_eq!(tcp, Scanner::Tcp("clamd.example:3310".into()));
        let unix: Scanner = "unix:/run/clamd".parse().unwrap();
        assert_eq!(unix, Scanner::Unix("/run/clamd".into()));
        assert_eq!(unix.to_string(), "unix:/run/clamd");
        for wrong in ["", "clamd", "clamd:", "clamd:99999", ":3310", "unix:run"] {
            assert!(wrong.parse::<Scanner>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn answers_are_understood() {
        let verdict = |text| understood(text).unwrap();
        assert_eq!(verdict("stream: OK\0"), Some(Verdict::Clean));
        let found = Verdict::Found("Test.Signature".into());
        assert_eq!(verdict("stream: Test.Signature FOUND\0"), Some(found));
        let too_large = "INSTREAM size limit exceeded. ERROR\0";
        assert_eq!(verdict(too_large), Some(Verdict::TooLarge));
        assert_eq!(verdict(""), None);
        assert!(understood("stream: Can't allocate memory ERROR\0").is_err());
    }

    /// A scanner that closes the connection, or answers something else, is no "clean".
    #[tokio::test]
    async fn a_connection_that_breaks_is_no_answer() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let scanner = Scanner::Tcp(listener.local_addr().unwrap().to_string());
        let file = vec![7; 1 << 20];
        let (scanned, ()) = tokio::join!(scanner.scan(&file[..]), async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut some = [0; 1_000];
            let _ = stream.read(&mut some).await;
        });
        assert!(scanned.is_err());
        drop(listener);
        assert!(scanner.scan(&file[..]).await.is_err());
    }

    /// clamd waits for the rest of a file that cannot be read. Nobody waits for clamd then.
    #[tokio::test]
    async fn a_file_that_breaks_ends_the_scan_at_once() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let scanner = Scanner::Tcp(listener.local_addr().unwrap().to_string());
        let parts = [
            io::Result::Ok(&[7; 1_000][..]),
            Err(io::ErrorKind::ConnectionReset.into()),
        ];
        let broken = StreamReader::new(futures_util::stream::iter(parts));
        let scanned = timeout(PART_TIMEOUT, scanner.scan(broken));
        let (scanned, sent) = tokio::join!(scanned, async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut sent = Vec::new();
            stream.read_to_end(&mut sent).await.unwrap();
            sent
        });
        let scanned = scanned.expect("it waits for an answer");
        assert!(matches!(scanned, Err(NotScanned::File(_))), "{scanned:?}");
        assert!(
            !sent.ends_with(&[0; 4]),
            "the part without bytes: clamd would scan half a file"
        );
    }
}
