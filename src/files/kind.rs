//! The media type of a file, decided from its first bytes. The name and the type that a client claims have no part in it.

/// The number of bytes from the start of a file that [`sniff`] reads at most.
pub const HEAD_BYTES: usize = 8 * 1024;

/// The media type under which a file is served that browsers must not display.
pub const DOWNLOAD: &str = "application/octet-stream";

/// The types of video and audio that browsers may display, besides the images and Ogg.
const MEDIA: [&str; 3] = ["video/mp4", "video/webm", "audio/mpeg"];

/// The types of Ogg files.
const OGG: [&str; 2] = ["audio/ogg", "video/ogg"];

/// How pictures, videos and sounds begin that `infer` does not know in every case. First TIFF, and raw files of cameras.
const SIGNATURES: [&[u8]; 29] = [
    b"II\x2A\0",
    b"MM\0\x2A",
    b"II\x2B\0",
    b"MM\0\x2B",
    b"IIRO",
    b"IIRS",
    b"IIU\0",
    b"FUJIFILM",
    b"\0MRM",
    b"FOVb",
    // JPEG 2000 without a container, OpenEXR, Radiance, GIMP.
    b"\xFF\x4F\xFF\x51",
    b"\x76\x2F\x31\x01",
    b"#?RADIANCE",
    b"#?RGBE",
    b"gimp xcf",
    // Matroska and WebM, RealMedia.
    b"\x1A\x45\xDF\xA3",
    b".RMF",
    b".ra\xFD",
    // Sounds: CAF, 64-bit WAVE, WavPack, Sun, DSD.
    b"caff\0",
    b"RF64",
    b"wvpk",
    b".snd",
    b"FRM8",
    // MPEG layers II and III without ID3. `FF FE` and `FF FF` are not here: texts in UTF-16 begin with the former.
    b"\xFF\xE3",
    b"\xFF\xF3",
    b"\xFF\xF4",
    b"\xFF\xFA",
    b"\xFF\xFC",
    b"\xFF\xFD",
];

/// The types of the first box of MP4, HEIC, AVIF, QuickTime and their relatives.
const BOXES: [&[u8]; 7] = [
    b"ftyp", b"moov", b"mdat", b"wide", b"skip", b"free", b"pnot",
];

/// The packets of MPEG transport streams: where the first one begins, and how long each is. Cameras write a time before each,
/// and broadcasters a checksum after it.
const PACKETS: [(usize, usize); 3] = [(0, 188), (4, 192), (0, 204)];
const PACKET_BEGINS: u8 = 0x47;
/// Packets that are looked at.
const PACKETS_MAX: usize = 8;

/// The media type of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kind {
    mime: &'static str,
    inline: bool,
    is_media: bool,
}

/// An image format that is stripped of metadata and gets a thumbnail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    Jpeg,
    Png,
    Gif,
    Webp,
}

impl Kind {
    const UNKNOWN: Self = Self {
        mime: DOWNLOAD,
        inline: false,
        is_media: false,
    };

    /// Returns the type that the bytes look like. It is for information: the file is served as [`Self::served_mime`].
    #[must_use]
    pub fn mime(self) -> &'static str {
        self.mime
    }

    /// Whether browsers may display the file.
    #[must_use]
    pub fn is_inline(self) -> bool {
        self.inline
    }

    /// Returns the type of the HTTP response, [`DOWNLOAD`] for every file that is not inline.
    #[must_use]
    pub fn served_mime(self) -> &'static str {
        if self.inline { self.mime } else { DOWNLOAD }
    }

    /// Whether the file is a picture, a video or a sound, which may say where, when and with what it was made.
    #[must_use]
    pub fn is_media(self) -> bool {
        let families = ["image/", "video/", "audio/"];
        self.is_media || families.iter().any(|family| self.mime.starts_with(family))
    }

    /// Returns the image format. `None` if the file is no image that may be displayed.
    #[must_use]
    pub fn format(self) -> Option<Format> {
        self.inline.then(|| Format::of_mime(self.mime)).flatten()
    }

    /// Returns the kind of the same file if it turned out not to be displayable.
    #[must_use]
    pub fn as_download(self) -> Self {
        Self {
            inline: false,
            ..self
        }
    }

    fn inline(mime: &'static str) -> Self {
        Self {
            mime,
            inline: true,
            is_media: true,
        }
    }
}

impl Format {
    const ALL: [Self; 4] = [Self::Jpeg, Self::Png, Self::Gif, Self::Webp];

    #[must_use]
    pub fn mime(self) -> &'static str {
        match self {
            Self::Jpeg => "image/jpeg",
            Self::Png => "image/png",
            Self::Gif => "image/gif",
            Self::Webp => "image/webp",
        }
    }

    /// Returns the number of the format, by which [`Self::of_number`] finds it.
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Jpeg => 0,
            Self::Png => 1,
            Self::Gif => 2,
            Self::Webp => 3,
        }
    }

    pub(super) fn of_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    fn of_mime(mime: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.mime() == mime)
    }

    /// Reads the whole signature, as browsers do. `infer` accepts a part of it.
    fn of_head(head: &[u8]) -> Option<Self> {
        if head.starts_with(b"\xFF\xD8\xFF") {
            Some(Self::Jpeg)
        } else if head.starts_with(b"\x89PNG\r\n\x1A\n") {
            Some(Self::Png)
        } else if head.starts_with(b"GIF87a") || head.starts_with(b"GIF89a") {
            Some(Self::Gif)
        } else if head.starts_with(b"RIFF") && head.get(8..12) == Some(b"WEBP") {
            Some(Self::Webp)
        } else {
            None
        }
    }
}

/// Whether browsers may display files whose bytes have this media type.
#[must_use]
pub fn is_inline(mime: &str) -> bool {
    let images = Format::ALL.map(Format::mime);
    images.contains(&mime) || MEDIA.contains(&mime) || OGG.contains(&mime)
}

/// Decides the media type from the first bytes of a file.
#[must_use]
pub fn sniff(head: &[u8]) -> Kind {
    let head = head.get(..HEAD_BYTES).unwrap_or(head);
    if let Some(format) = Format::of_head(head) {
        return Kind::inline(format.mime());
    }
    if head.starts_with(b"OggS\0") {
        return Kind::inline(ogg_mime(head));
    }
    let is_media = is_media(head);
    let unknown = Kind {
        is_media,
        ..Kind::UNKNOWN
    };
    let Some(mime) = infer::get(head).map(|found| found.mime_type()) else {
        return unknown;
    };
    if MEDIA.contains(&mime) {
        return Kind::inline(mime);
    }
    // `infer` found an image by a part of its signature.
    if Format::of_mime(mime).is_some() {
        return unknown;
    }
    Kind {
        mime,
        inline: false,
        is_media,
    }
}

/// Whether a file of a kind that `infer` may not know begins like a picture, a video or a sound.
fn is_media(head: &[u8]) -> bool {
    let first = head.get(4..8).unwrap_or_default();
    // The length of a box begins with 0 below 16 MiB. Without that, a text could begin with "The free".
    let is_box = BOXES.contains(&first) && head.starts_with(b"\0") || first == b"ftyp";
    is_box
        || SIGNATURES.iter().any(|begin| head.starts_with(begin))
        || head.starts_with(b"FORM") && head.get(8..12) == Some(b"AIFC")
        || is_transport_stream(head)
        || is_svg(head)
}

/// Whether at least two packets are there, and each begins as it must.
fn is_transport_stream(head: &[u8]) -> bool {
    PACKETS.iter().any(|&(first, len)| {
        let mut begins = head.iter().skip(first).step_by(len).take(PACKETS_MAX);
        begins.clone().count() > 1 && begins.all(|&byte| byte == PACKET_BEGINS)
    })
}

/// Whether a text begins like SVG: with its element, or with what may be before it in XML.
fn is_svg(head: &[u8]) -> bool {
    let text = head.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(head);
    let text = text.trim_ascii_start();
    let element = b"<svg";
    let before = [&b"<?xml"[..], b"<!--", b"<!DOCTYPE svg"];
    text.starts_with(element)
        || before.iter().any(|begin| text.starts_with(begin))
            && text.windows(element.len()).any(|window| window == element)
}

/// Returns the type of an Ogg file: video if one of its streams, which all begin in the first pages, is Theora.
fn ogg_mime(head: &[u8]) -> &'static str {
    let theora = b"\x80theora";
    if head.windows(theora.len()).any(|window| window == theora) {
        "video/ogg"
    } else {
        "audio/ogg"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::fixtures::{Random, samples};

    fn padded(head: &[u8]) -> Vec<u8> {
        let mut bytes = head.to_vec();
        bytes.resize(400, 0);
        bytes
    }

    #[test]
    fn images_are_inline() {
        for sample in samples() {
            let kind = sniff(&sample.bytes);
            assert_eq!(kind.format(), Some(sample.format), "{}", sample.name);
            assert!(kind.is_inline());
            assert_eq!(kind.served_mime(), sample.format.mime());
            let download = kind.as_download();
            assert_eq!(download.format(), None);
            assert_eq!(download.served_mime(), DOWNLOAD);
            assert_eq!(download.mime(), sample.format.mime());
        }
    }

    #[test]
    fn trusted_media_are_inline() {
        for (head, mime) in [
            (&b"\0\0\0\x18ftypisom"[..], "video/mp4"),
            (b"\0\0\0\x18ftypmp42", "video/mp4"),
            (b"\x1A\x45\xDF\xA3\x01\x42\x82\x84webm", "video/webm"),
            (b"ID3\x04", "audio/mpeg"),
            (b"\xFF\xFB\x90", "audio/mpeg"),
            (b"OggS\0\x02", "audio/ogg"),
            (b"OggS\0\x02----------------------OpusHead", "audio/ogg"),
            (b"OggS\0\x02----------------------\x80theora", "video/ogg"),
        ] {
            let kind = sniff(&padded(head));
            assert_eq!(kind.served_mime(), mime, "{head:?}");
            assert!(kind.is_inline());
            assert_eq!(kind.format(), None);
        }
    }

    #[test]
    fn other_files_are_downloads() {
        for head in [
            &b""[..],
            b"<svg xmlns=\"http://www.w3.org/2000/svg\" onload=\"alert(1)\"/>",
            b"<?xml version=\"1.0\"?><svg/>",
            b"<!DOCTYPE html><script>alert(1)</script>",
            b"<html>",
            b"%PDF-1.7",
            b"PK\x03\x04",
            b"MZ",
            b"\x1A\x45\xDF\xA3\x01\x42\x82\x88matroska",
            b"\0\0\0\x18ftypheic",
            b"\0\0\0\x14ftypqt  ",
            b"BM",
            b"II\x2A\0",
            b"\0\0\x01\0",
            b"GIF",
            b"GIF88a",
            b"\x89PNG",
            b"\xFF\xD8",
            b"xxxx\0\0\0\0WEBP",
            b"RIFF\0\0\0\0WAVE",
            b"hello",
        ] {
            for bytes in [head.to_vec(), padded(head)] {
                let kind = sniff(&bytes);
                assert!(!kind.is_inline(), "{head:?}: {kind:?}");
                assert_eq!(kind.served_mime(), DOWNLOAD);
                assert_eq!(kind.format(), None);
            }
        }
        assert_eq!(sniff(b"%PDF-1.7").mime(), "application/pdf");
    }

    #[test]
    fn pictures_videos_and_sounds_are_media() {
        let heads = [
            &b"\x89PNG\r\n\x1A\n"[..],
            b"\0\0\0\x18ftypheic",
            b"\0\0\0\x18ftypavif",
            b"\0\0\0\x18ftypcrx ",
            b"\0\0\0\x14ftypqt  ",
            b"II\x2A\0\x08\0\0\0\x43\0",
            b"MM\0\x2A",
            b"FUJIFILMCCD-RAW ",
            b"OggS\0\x02",
            b"\x1A\x45\xDF\xA3\x01\x42\x82\x88matroska",
            b"ID3\x04",
            b"\0\0\0\x08wide\0\0\0\0mdat",
            b"\0\0\0\x08skip",
            b"\0\0\x10\0free",
            b"\0\0\0\x14pnot",
            b"\0\0\0\x08moov",
            b"\0MRM",
            b"FOVb",
            b"\xFF\x4F\xFF\x51",
            b"\x76\x2F\x31\x01",
            b"#?RADIANCE\n",
            b".RMF",
            b"caff\0\x01",
            b"FORM\0\0\0\0AIFC",
            b"\xFF\xFA\x90",
            b"<svg xmlns=\"http://www.w3.org/2000/svg\"/>",
            b"\xEF\xBB\xBF <?xml version=\"1.0\"?><!-- by a program --><svg/>",
        ];
        for head in heads {
            assert!(sniff(&padded(head)).is_media(), "{head:?}");
        }
        for head in [
            &b""[..],
            b"hello",
            b"%PDF-1.7",
            b"PK\x03\x04",
            b"The free world",
            b"G",
            b"\xFF\xFEh\0e\0",
            b"<?xml version=\"1.0\"?><feed/>",
            b"<!DOCTYPE html><svg/>",
        ] {
            assert!(!sniff(&padded(head)).is_media(), "{head:?}");
        }
    }

    #[test]
    fn transport_streams_are_media() {
        for (first, len) in [(0, 188), (4, 192), (0, 204)] {
            for packets in [2, 3, 40] {
                let mut stream = vec![1; packets * len];
                for n in 0..packets {
                    stream[first + n * len] = b'G';
                }
                assert!(sniff(&stream).is_media(), "{packets} of {len}");
                stream[first + len] = b'H';
                assert!(!sniff(&stream).is_media());
            }
        }
        assert!(!sniff(b"G").is_media());
    }

    #[test]
    fn a_polyglot_is_what_its_first_bytes_say() {
        let kind = sniff(b"GIF89a/*<html>*/=1;alert(1)");
        assert_eq!(kind.format(), Some(Format::Gif));
    }

    #[test]
    fn no_bytes_make_it_panic() {
        let mut random = Random::new(1);
        for _ in 0..3000 {
            let length = random.below(600);
            let _ = sniff(&random.bytes(length));
        }
        let magics: [&[u8]; 6] = [
            b"PK\x03\x04",
            b"\x7FELF",
            b"MZ",
            b"\xD0\xCF\x11\xE0\xA1\xB1\x1A\xE1",
            b"\0\0\0\x18ftyp",
            b"<?xml",
        ];
        for magic in magics {
            for _ in 0..500 {
                let length = random.below(9000);
                let bytes = [magic, &random.bytes(length)].concat();
                let _ = sniff(&bytes);
            }
        }
        for sample in samples() {
            for length in 0..sample.bytes.len().min(600) {
                let _ = sniff(&sample.bytes[..length]);
            }
        }
    }
}
