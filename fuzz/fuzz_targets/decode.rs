#![no_main]
//! The decoder on any bytes: never a panic, never a deep recursion, never much memory.

use chat_gateway::protocol::Codec;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for codec in [Codec::Json, Codec::MessagePack] {
        let _ = codec.decode(bytes);
    }
});
