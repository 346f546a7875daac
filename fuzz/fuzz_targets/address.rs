//! Addresses of git repositories. The canonical form of any address is its own canonical form, leaves no folder, and is what an
//! exact rule permits. A refusal is one short line without a password.

#![no_main]

use git_address::{Address, AllowList, Match};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = str::from_utf8(data) else {
        return;
    };
    let nothing = AllowList::new("nothing", Match::Full).expect("a rule");
    let refusal = nothing.judge(text).expect_err("nothing is allowed");
    let shown = refusal.to_string();
    assert!(
        shown.len() <= 8192 && !shown.contains(['\n', '\r', '\0']),
        "{shown}"
    );
    let Ok(address) = Address::parse(text) else {
        return;
    };
    let canonical = address.to_string();
    assert_eq!(Address::parse(&canonical).as_ref(), Ok(&address));
    assert!(!canonical.split('/').any(|segment| segment == ".."));
    assert!(address.contains(&address));
});
