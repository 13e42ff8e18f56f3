//! A server that writes what it receives to files with the same syncs as the gateway, and does nothing else.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
};

/// Bytes that are read from the socket at once.
const PART_BYTES: usize = 256 << 10;

/// Starts the server for one connection. Returns the connection.
pub(super) fn connect(folder: PathBuf) -> anyhow::Result<TcpStream> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let stream = TcpStream::connect(listener.local_addr()?)?;
    stream.set_nodelay(true)?;
    let (served, _) = listener.accept()?;
    std::thread::spawn(move || {
        if let Err(error) = serve(served, &folder) {
            eprintln!("loadtest: the bare server failed: {error}");
        }
    });
    Ok(stream)
}

/// Sends a file, and waits until it is durable.
pub(super) fn upload(stream: &mut TcpStream, data: &[u8]) -> anyhow::Result<()> {
    stream.write_all(&(data.len() as u64).to_be_bytes())?;
    for part in data.chunks(PART_BYTES) {
        stream.write_all(part)?;
    }
    Ok(stream.read_exact(&mut [0])?)
}

fn serve(mut stream: TcpStream, folder: &Path) -> std::io::Result<()> {
    let (incoming, files) = (folder.join("incoming"), folder.join("files"));
    fs::create_dir_all(&incoming)?;
    fs::create_dir_all(&files)?;
    let mut part = vec![0; PART_BYTES];
    let mut size = [0; 8];
    for number in 0_u64.. {
        if stream.read_exact(&mut size).is_err() {
            break;
        }
        let mut left = usize::try_from(u64::from_be_bytes(size)).unwrap_or_default();
        let (from, to) = (
            incoming.join(number.to_string()),
            files.join(number.to_string()),
        );
        let mut file = File::create_new(&from)?;
        while left > 0 {
            let want = left.min(PART_BYTES);
            let read = stream.read(&mut part[..want])?;
            if read == 0 {
                return Ok(());
            }
            file.write_all(&part[..read])?;
            left -= read;
        }
        file.sync_all()?;
        fs::create_dir(&to)?;
        fs::rename(&from, to.join("original"))?;
        for folder in [&to, &files, &incoming] {
            File::open(folder)?.sync_all()?;
        }
        stream.write_all(&[1])?;
    }
    Ok(())
}
