#![no_main]
//! Looks at arbitrary bytes as at an uploaded file, and as at its name.

use chat_gateway::files::{
    DOWNLOAD, Format, ImageError, ImageLimits, is_inline, process, sniff, strip,
};
use chat_gateway::model::text::file_name;
use libfuzzer_sys::fuzz_target;

#[path = "../properties.rs"]
mod properties;

fuzz_target!(|bytes: &[u8]| properties::check(bytes));
