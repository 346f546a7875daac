//! `api-launcher serve` as a process.
