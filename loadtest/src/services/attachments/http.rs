//! Uploads over HTTP, on one connection that is kept.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

/// Bytes that are written to the socket at once.
const PART_BYTES: usize = 256 << 10;
/// The longest wait for a response.
const PATIENCE: Duration = Duration::from_secs(60);

/// One user's connection.
pub(crate) struct Http {
    stream: BufReader<TcpStream>,
    host: String,
    token: String,
}

/// The status, the header `file-state` and the body of a response.
struct Response {
    status: u16,
    state: String,
    body: Vec<u8>,
}

impl Http {
    pub(crate) fn connect(address: &str, token: &str) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self {
            stream: BufReader::new(stream),
            host: address.to_owned(),
            token: token.to_owned(),
        })
    }

    fn head(&mut self, request: &str, headers: &str, len: usize) -> anyhow::Result<()> {
        let head = format!(
            "{request} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\ntus-resumable: 1.0.0\r\ncontent-length: {len}\r\n{headers}\r\n",
            self.host, self.token
        );
        Ok(self.stream.get_mut().write_all(head.as_bytes())?)
    }

    fn response(&mut self) -> anyhow::Result<Response> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.with_context(|| format!("no HTTP response: {line:?}"))?;
        let (mut len, mut state) = (0, String::new());
        loop {
            line.clear();
            self.stream.read_line(&mut line)?;
            let Some((name, value)) = line.trim_end().split_once(": ") else {
                break;
            };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => len = value.parse()?,
                "file-state" => value.clone_into(&mut state),
                _ => {}
            }
        }
        let mut body = vec![0; len];
        self.stream.read_exact(&mut body)?;
        Ok(Response {
            status,
            state,
            body,
        })
    }

    /// Begins an upload. Returns the id of the file.
    pub(crate) fn begin(&mut self, conversation: &str, size: usize) -> anyhow::Result<String> {
        let body = json!({"conversation": conversation, "name": "data.bin", "size": size});
        let body = body.to_string();
        let json = "content-type: application/json\r\n";
        // With the header of tus, the facts would have to be in headers.
        let request = format!(
            "POST /v1/attachments HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\ncontent-length: {}\r\n{json}\r\n{body}",
            self.host,
            self.token,
            body.len()
        );
        self.stream.get_mut().write_all(request.as_bytes())?;
        let response = self.response()?;
        let said: Value = serde_json::from_slice(&response.body)?;
        match (response.status, said["id"].as_str()) {
            (201, Some(id)) => Ok(id.to_owned()),
            _ => bail!("an upload was not begun: {} {said}", response.status),
        }
    }

    /// Sends the head of the only part of an upload, and so many of its bytes.
    pub(super) fn send(&mut self, file: &str, data: &[u8], sent: usize) -> anyhow::Result<()> {
        let headers = "upload-offset: 0\r\ncontent-type: application/offset+octet-stream\r\n";
        let request = format!("PATCH /v1/attachments/{file}/upload");
        self.head(&request, headers, data.len())?;
        self.rest(&data[..sent])
    }

    /// Sends more bytes of a part.
    pub(super) fn rest(&mut self, data: &[u8]) -> anyhow::Result<()> {
        for part in data.chunks(PART_BYTES) {
            self.stream.get_mut().write_all(part)?;
        }
        Ok(())
    }

    /// Waits until messages may have the file.
    pub(super) fn ready(&mut self) -> anyhow::Result<()> {
        let Response {
            status,
            state,
            body,
        } = self.response()?;
        if (status, state.as_str()) != (204, "ready") {
            let said = String::from_utf8_lossy(&body);
            bail!("an upload did not become ready: {status} {state} {said}");
        }
        Ok(())
    }

    /// Uploads a file as one part. Returns its id.
    pub(crate) fn upload(&mut self, conversation: &str, data: &[u8]) -> anyhow::Result<String> {
        let file = self.begin(conversation, data.len())?;
        self.send(&file, data, data.len())?;
        self.ready()?;
        Ok(file)
    }

    /// Gives a file up that no message has.
    pub(super) fn give_up(&mut self, file: &str) -> anyhow::Result<()> {
        self.head(&format!("DELETE /v1/attachments/{file}/upload"), "", 0)?;
        let response = self.response()?;
        if response.status != 204 {
            bail!("a file could not be given up: {}", response.status);
        }
        Ok(())
    }
}
