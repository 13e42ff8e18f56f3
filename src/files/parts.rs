//! The parts in which a file is uploaded to a bucket.

/// Bytes of a part. Only the last part of a file is smaller.
pub const PART_BYTES: u64 = 16 << 20;

/// A part of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// It counts from 1.
    pub number: u16,
    pub offset: u64,
    pub size: u64,
}

/// A part that is in the bucket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredPart {
    pub number: u16,
    pub size: u64,
    pub etag: String,
}

/// Returns the parts of a file of this size.
pub fn parts(size: u64) -> impl Iterator<Item = Part> {
    let of = move |number: u16| {
        let offset = u64::from(number - 1) * PART_BYTES;
        Part {
            number,
            offset,
            size: PART_BYTES.min(size - offset),
        }
    };
    let count = u16::try_from(size.div_ceil(PART_BYTES)).unwrap_or(u16::MAX);
    (1..=count).map(of)
}

/// Returns the parts of a file of this size that are not in the bucket, or have another size there.
pub fn missing(size: u64, stored: &[StoredPart]) -> impl Iterator<Item = Part> + '_ {
    let is_stored = |part: &Part| {
        let same = |there: &StoredPart| (there.number, there.size) == (part.number, part.size);
        stored.iter().any(same)
    };
    parts(size).filter(move |part| !is_stored(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_file() {
        for size in [1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 5 << 30] {
            let mut offset = 0;
            for (part, number) in parts(size).zip(1..) {
                assert_eq!((part.number, part.offset), (number, offset));
                assert!(part.size > 0);
                offset += part.size;
            }
            assert_eq!(offset, size);
        }
    }

    #[test]
    fn a_part_of_another_size_is_missing() {
        let size = 2 * PART_BYTES + 5;
        let stored = |number, size| StoredPart {
            number,
            size,
            etag: String::new(),
        };
        let numbers = |all: &[StoredPart]| -> Vec<u16> {
            missing(size, all).map(|part| part.number).collect()
        };
        assert_eq!(numbers(&[]), [1, 2, 3]);
        assert_eq!(numbers(&[stored(3, 5), stored(1, 7)]), [1, 2]);
        let all = [
            stored(2, PART_BYTES),
            stored(1, PART_BYTES),
            stored(3, 5),
            stored(9, 1),
        ];
        assert_eq!(numbers(&all), [0; 0]);
    }
}
