#![no_main]
//! Feeds arbitrary bytes to both decoders. They must not panic, recurse deeply or allocate much memory.

use chat_gateway::protocol::Codec;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for codec in [Codec::Json, Codec::MessagePack] {
        let _ = codec.decode(bytes);
    }
});
