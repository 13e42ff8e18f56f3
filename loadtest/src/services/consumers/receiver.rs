//! The receiver of a webhook: an HTTP server on loopback that notes what arrives, and answers after a while.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, UNIX_EPOCH},
};

use anyhow::bail;

use super::arrivals::Arrivals;
use crate::{server::free_address, worker::lock};

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";

/// A receiver that can be stopped and started. What arrived is kept.
pub(super) struct Receiver {
    address: String,
    noted: Arc<Noted>,
    listening: Option<Listening>,
}

struct Noted {
    arrivals: Mutex<Arrivals>,
    /// The time between a request and its answer.
    delay: Duration,
}

/// A listener and its connections.
struct Listening {
    connections: Arc<Connections>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct Connections {
    is_over: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
}

impl Receiver {
    /// Starts a receiver that answers each request after `delay`.
    pub(super) fn start(delay: Duration) -> anyhow::Result<Self> {
        let mut receiver = Self {
            address: free_address(),
            noted: Arc::new(Noted {
                arrivals: Mutex::new(Arrivals::new()?),
                delay,
            }),
            listening: None,
        };
        receiver.listen()?;
        Ok(receiver)
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn arrivals(&self) -> MutexGuard<'_, Arrivals> {
        lock(&self.noted.arrivals)
    }

    /// Waits until this many events have arrived for the first time.
    pub(super) fn wait_for(&self, events: u64, patience: Duration) -> anyhow::Result<()> {
        let until = Instant::now() + patience;
        loop {
            let first = self.arrivals().first;
            if first >= events {
                return Ok(());
            }
            if Instant::now() > until {
                bail!("the receiver got only {first} of {events} events within {patience:?}");
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Listens again at the same address.
    pub(super) fn listen(&mut self) -> anyhow::Result<()> {
        let listener = TcpListener::bind(&self.address)?;
        let connections = Arc::new(Connections::default());
        let (noted, served) = (self.noted.clone(), connections.clone());
        let thread = thread::spawn(move || accept(&listener, &noted, &served));
        self.listening = Some(Listening {
            connections,
            thread,
        });
        Ok(())
    }

    /// Stops listening, and ends all connections. Requests that wait for their answers do not get any.
    pub(super) fn stop(&mut self) {
        let Some(Listening {
            connections,
            thread,
        }) = self.listening.take()
        else {
            return;
        };
        connections.is_over.store(true, Ordering::Relaxed);
        // Wakes the listener.
        drop(TcpStream::connect(&self.address));
        drop(thread.join());
        for stream in lock(&connections.streams).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.stop();
    }
}

fn accept(listener: &TcpListener, noted: &Arc<Noted>, connections: &Arc<Connections>) {
    for stream in listener.incoming() {
        if connections.is_over.load(Ordering::Relaxed) {
            return;
        }
        let Ok(stream) = stream else { continue };
        let Ok(to_end) = stream.try_clone() else {
            continue;
        };
        lock(&connections.streams).push(to_end);
        let noted = noted.clone();
        thread::spawn(move || {
            // An error ends the connection, which is what a kill or a stop does.
            let _ = serve(&stream, &noted);
            // The other handle would keep it open.
            let _ = stream.shutdown(Shutdown::Both);
        });
    }
}

/// Notes and answers the requests of one connection until it ends.
fn serve(stream: &TcpStream, noted: &Noted) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut reader, mut writer) = (BufReader::new(stream), stream);
    while let Some((id, body)) = request(&mut reader)? {
        let now = UNIX_EPOCH.elapsed().unwrap_or_default().as_millis();
        lock(&noted.arrivals).note(&id, &body, u64::try_from(now).unwrap_or(u64::MAX));
        thread::sleep(noted.delay);
        writer.write_all(ANSWER)?;
    }
    Ok(())
}

/// Reads a request. Returns its `webhook-id` and its body. `None` if the connection ended before it.
fn request(reader: &mut BufReader<&TcpStream>) -> io::Result<Option<(String, Vec<u8>)>> {
    let (mut line, mut id, mut length) = (String::new(), String::new(), 0);
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        if name.eq_ignore_ascii_case("webhook-id") {
            value.clone_into(&mut id);
        } else if name.eq_ignore_ascii_case("content-length") {
            length = value.parse().map_err(io::Error::other)?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some((id, body)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_receiver_refuses_and_can_start_again() {
        let mut receiver = Receiver::start(Duration::ZERO).unwrap();
        let send = |address: &str| {
            let mut stream = TcpStream::connect(address)?;
            stream.write_all(b"POST / HTTP/1.1\r\nWebhook-Id: x\r\ncontent-length: 2\r\n\r\n{}")?;
            let mut answer = vec![0; ANSWER.len()];
            stream.read_exact(&mut answer)?;
            io::Result::Ok(answer)
        };
        assert_eq!(send(receiver.address()).unwrap(), ANSWER);
        receiver.stop();
        assert!(send(receiver.address()).is_err());
        receiver.listen().unwrap();
        assert_eq!(send(receiver.address()).unwrap(), ANSWER);
        assert_eq!(receiver.arrivals().requests, 2);
    }
}
