//! Tests that look at changed and at random bytes as the fuzzing target does, with the same bytes in each run.

use super::{
    fixtures::{Random, samples, with_metadata},
    properties::check,
};

#[test]
fn changed_pictures_have_the_properties_of_any_file() {
    let mut random = Random::new(3);
    for sample in samples() {
        let dirty = with_metadata(&sample, 6);
        for _ in 0..1_500 {
            let mut bytes = dirty.clone();
            for _ in 0..=random.below(4) {
                let at = random.below(bytes.len());
                bytes[at] = random.bytes(1)[0];
            }
            if random.below(4) == 0 {
                bytes.truncate(random.below(bytes.len()));
            }
            check(&bytes);
        }
    }
}

#[test]
fn random_bytes_have_the_properties_of_any_file() {
    let mut random = Random::new(4);
    let samples = samples();
    for _ in 0..1_500 {
        let length = random.below(400);
        let noise = random.bytes(length);
        check(&noise);
        for sample in &samples {
            let head = random.below(sample.bytes.len().min(64));
            check(&[&sample.bytes[..head], &noise].concat());
        }
    }
}

#[test]
fn random_names_have_the_properties_of_any_name() {
    let mut random = Random::new(5);
    let letters: Vec<char> = ". /\\aé:\u{202e}\u{200b}\u{0}\u{3000}".chars().collect();
    for _ in 0..20_000 {
        let length = random.below(12);
        let name: String = (0..length)
            .map(|_| letters[random.below(letters.len())])
            .collect();
        check(name.as_bytes());
    }
}
