//! The two kinds of lists in variables. A list that was read can be written and read again.

#![no_main]

use std::collections::HashSet;

use job_contract::pairs::{parse_list, parse_pairs};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let pairs = parse_pairs(text);
    assert!(pairs.len() <= text.split(';').count());
    for (key, value) in &pairs {
        assert!(!key.contains(['=', ';']) && !value.contains(';'));
        assert_eq!((key.trim(), value.trim()), (&**key, &**value));
    }
    let written: Vec<_> = pairs
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    assert_eq!(parse_pairs(&written.join(" ; ")), pairs);

    let list = parse_list(text);
    assert!(
        list.iter()
            .all(|element| !element.is_empty() && !element.contains(','))
    );
    assert_eq!(list.iter().collect::<HashSet<_>>().len(), list.len());
    assert_eq!(parse_list(&list.join(", ")), list);
});
