//! What a gateway and a process that decodes a picture say to each other.

use bytes::{BufMut as _, Bytes};

use crate::{
    files::{Format, ImageError, ImageLimits, Processed, Thumbnail, sniff},
    model::limits::PICTURE_BYTES_MAX,
};

/// Bytes of a [`Job`] before its picture.
pub(super) const HEADER_BYTES: usize = 1 + 8 + 4 + 4 + 8;

/// Bytes of an answer that are not the thumbnail's pixels: the numbers, and its colour profile.
const ANSWER_BYTES: u64 = 64 << 10;
/// Bytes of a pixel of a thumbnail at most, since some do not get smaller when they are compressed.
const PIXEL_BYTES_MAX: u64 = 5;
/// Bytes of the reason why a picture cannot be decoded.
const REASON_BYTES_MAX: usize = 200;

const SHOWN: u8 = 0;
const REFUSED: u8 = 1;

/// A picture to decode.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) format: Format,
    pub(super) limits: ImageLimits,
    /// Bytes of the picture, which follow.
    pub(super) length: usize,
}

impl Job {
    pub(super) fn new(format: Format, limits: &ImageLimits, bytes: &[u8]) -> Self {
        Self {
            format,
            limits: *limits,
            length: bytes.len(),
        }
    }

    pub(super) fn header(&self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        let mut rest = &mut header[..];
        rest.put_u8(self.format.number());
        rest.put_u64(self.limits.pixels);
        rest.put_u32(self.limits.side);
        rest.put_u32(self.limits.thumbnail_side);
        rest.put_u64(self.length as u64);
        header
    }

    /// Reads a header. `None` if it is wrong.
    pub(super) fn read(header: &[u8; HEADER_BYTES]) -> Option<Self> {
        let mut rest = &header[..];
        let [format] = take(&mut rest)?;
        let limits = ImageLimits {
            pixels: u64::from_be_bytes(take(&mut rest)?),
            side: u32::from_be_bytes(take(&mut rest)?),
            thumbnail_side: u32::from_be_bytes(take(&mut rest)?),
        };
        let length = u64::from_be_bytes(take(&mut rest)?);
        Some(Self {
            format: Format::of_number(format)?,
            limits,
            length: usize::try_from(length)
                .ok()
                .filter(|_| length <= PICTURE_BYTES_MAX)?,
        })
    }
}

/// Bytes of an answer at most.
pub(super) fn answer_max(limits: &ImageLimits) -> u64 {
    let side = u64::from(limits.thumbnail_side);
    side * side * PIXEL_BYTES_MAX + ANSWER_BYTES
}

pub(super) fn answer(processed: Result<Processed, ImageError>) -> Vec<u8> {
    let mut answer = Vec::new();
    match processed {
        Ok(Processed {
            width,
            height,
            thumbnail,
        }) => {
            answer.put_u8(SHOWN);
            for number in [width, height, thumbnail.width, thumbnail.height] {
                answer.put_u32(number);
            }
            answer.put_u8(thumbnail.format.number());
            answer.put_slice(&thumbnail.bytes);
        }
        Err(error) => {
            answer.put_u8(REFUSED);
            let reason = error.to_string();
            answer.extend(reason.bytes().take(REASON_BYTES_MAX));
        }
    }
    answer
}

/// Reads an answer: the picture, or the reason why it is not decoded. The process may be in the hands of the picture, so
/// the answer may be anything.
pub(super) fn read_answer(
    mut answer: &[u8],
    limits: &ImageLimits,
) -> Result<Result<Processed, String>, &'static str> {
    match take::<1>(&mut answer) {
        Some([SHOWN]) => {
            let processed = read_processed(answer).ok_or("it ends too early")?;
            check(&processed, limits).map(|()| Ok(processed))
        }
        Some([REFUSED]) => {
            let reason = &answer[..answer.len().min(REASON_BYTES_MAX)];
            let reason = String::from_utf8_lossy(reason).escape_debug().to_string();
            Ok(Err(reason))
        }
        _ => Err("it begins with an unknown byte"),
    }
}

fn read_processed(mut rest: &[u8]) -> Option<Processed> {
    let mut number = || take(&mut rest).map(u32::from_be_bytes);
    let (width, height) = (number()?, number()?);
    let (small_width, small_height) = (number()?, number()?);
    let [format] = take(&mut rest)?;
    Some(Processed {
        width,
        height,
        thumbnail: Thumbnail {
            width: small_width,
            height: small_height,
            format: Format::of_number(format)?,
            bytes: Bytes::copy_from_slice(rest),
        },
    })
}

fn check(processed: &Processed, limits: &ImageLimits) -> Result<(), &'static str> {
    let Processed {
        width,
        height,
        thumbnail,
    } = processed;
    let sides = [*width, *height, thumbnail.width, thumbnail.height];
    if sides.contains(&0) || u64::from(*width) * u64::from(*height) > limits.pixels {
        return Err("its picture has no such size");
    }
    if thumbnail.width.max(thumbnail.height) > limits.thumbnail_side {
        return Err("its thumbnail is too large");
    }
    let is_thumbnail = matches!(thumbnail.format, Format::Jpeg | Format::Png);
    if !is_thumbnail || sniff(&thumbnail.bytes).format() != Some(thumbnail.format) {
        return Err("its thumbnail has another format");
    }
    Ok(())
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::{
        fixtures::{Random, samples},
        process,
    };

    #[test]
    fn jobs_and_answers_are_read_as_they_were_written() {
        let limits = ImageLimits {
            thumbnail_side: 8,
            ..ImageLimits::default()
        };
        for sample in samples() {
            let job = Job::new(sample.format, &limits, &sample.bytes);
            let read = Job::read(&job.header()).unwrap();
            assert_eq!(format!("{job:?}"), format!("{read:?}"));
            let processed = process(&sample.bytes, sample.format, &limits).unwrap();
            let answer = answer(Ok(processed.clone()));
            assert!(answer.len() as u64 <= answer_max(&limits));
            assert_eq!(read_answer(&answer, &limits), Ok(Ok(processed)));
        }
        let refused = answer(Err(ImageError::TooMuchMemory));
        let reason = ImageError::TooMuchMemory.to_string();
        assert_eq!(read_answer(&refused, &limits), Ok(Err(reason)));
    }

    #[test]
    fn a_picture_that_is_too_long_is_not_read() {
        let mut job = Job::new(Format::Png, &ImageLimits::default(), b"");
        job.length = usize::try_from(PICTURE_BYTES_MAX).unwrap() + 1;
        assert!(Job::read(&job.header()).is_none());
    }

    #[test]
    fn no_answer_is_believed_blindly() {
        let limits = ImageLimits::default();
        let sample = samples().remove(0);
        let processed = process(&sample.bytes, sample.format, &limits).unwrap();
        let good = answer(Ok(processed));
        for (at, byte) in [
            (0, 7),
            (1, 0xFF),
            (2, 0xFF),
            (9, 0xFF),
            (17, 3),
            (17, 1),
            (18, 0),
        ] {
            let mut bad = good.clone();
            bad[at] = byte;
            assert!(read_answer(&bad, &limits).is_err(), "{at}");
        }
        for length in 0..18 {
            assert!(read_answer(&good[..length], &limits).is_err(), "{length}");
        }
        let mut random = Random::new(9);
        for _ in 0..5_000 {
            let length = random.below(200);
            let _ = read_answer(&random.bytes(length), &limits);
        }
    }
}
