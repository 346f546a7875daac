//! Image references and registries, one on each line. A reference that is moved to another registry is valid there.

#![no_main]

use libfuzzer_sys::fuzz_target;
use manifest::image::{Reference, check, check_registry};

fuzz_target!(|text: &str| {
    let (image, registry) = text
        .split_once('\n')
        .unwrap_or((text, "mirror.example:5000/team"));
    let reference = Reference::parse(image);
    assert_eq!(check(image).is_ok(), reference.is_ok());
    let Ok(reference) = reference else {
        return;
    };
    let (host, path) = reference.origin();
    assert!(path.starts_with(&format!("{host}/")), "{path}");
    assert!(!image.chars().any(char::is_whitespace));

    if check_registry(registry).is_err() {
        return;
    }
    let moved = reference.in_registry(registry);
    // The registry and the reference may be too long together.
    if registry.len() + image.len() < 200 {
        let (host, path) = Reference::parse(&moved)
            .expect("still a reference")
            .origin();
        assert!(
            path.starts_with(registry.trim_end_matches('/')),
            "{moved} comes from {host}"
        );
    }
});
