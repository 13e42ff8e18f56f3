//! Compares what tests make with files in `tests/golden`. `GOLDEN=write cargo test --lib golden` writes the files.

use std::{env, fs, path::Path};

/// Compares a text with the file of this name.
pub(crate) fn check(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let path = path.join(name);
    if env::var("GOLDEN").is_ok_and(|what| what == "write") {
        fs::write(&path, text).unwrap();
    }
    let golden = fs::read_to_string(path).unwrap();
    assert!(golden == text, "{name} is different:\n{text}");
}
