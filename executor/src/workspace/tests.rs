//! The workspace with real peers: git over file, HTTP(S) and SSH, and HTTP servers for everything else.

mod clones;
mod content;
mod credentials;
mod logins;
mod modules;
mod rules;
mod support;
