//! How SQLite runs the statements. It uses a partial index only for a statement that repeats the index's condition.

use super::fixture::*;

/// The statements of calls and duties. Those of `sweep` may read everything: they run once after a pause.
const SOURCES: [&str; 6] = [
    include_str!("../store/choice.rs"),
    include_str!("../store/instances.rs"),
    include_str!("../store/submissions.rs"),
    include_str!("../store/rows.rs"),
    include_str!("../store/leases.rs"),
    include_str!("../store/views.rs"),
];

/// Returns the statements in a source file.
fn statements(source: &str) -> impl Iterator<Item = String> {
    let quoted = source.split('"').skip(1).step_by(2);
    let plain = quoted.map(|text| text.replace("\\\n", "").trim().to_owned());
    plain.filter(|text| {
        let verbs = ["SELECT ", "UPDATE ", "DELETE "];
        verbs.iter().any(|verb| text.starts_with(verb))
    })
}

/// Ended tasks stay for a day. A list of all pools ends at its limit.
#[tokio::test]
async fn no_statement_of_a_call_reads_all_tasks() {
    let fixture = Fixture::open(Engine::Sqlite).await.unwrap();
    let mut tx = fixture.store.begin().await.unwrap();
    let mut explained = 0;
    for sql in SOURCES.iter().flat_map(|source| statements(source)) {
        let explain: &'static str = Box::leak(format!("EXPLAIN QUERY PLAN {sql}").into_boxed_str());
        for row in tx.rows(explain, &[]).await.unwrap() {
            let step = row.text("detail").unwrap();
            let reads_all = ["tasks", "t", "events", "payloads"].iter().any(|table| {
                step == format!("SCAN {table}")
                    || step.starts_with(&format!("SCAN {table} USING INDEX sqlite_autoindex"))
            });
            let is_limited = sql.contains("ORDER BY id DESC LIMIT") && sql.contains("$2 = ''");
            assert!(!reads_all || is_limited, "{step}: {sql}");
        }
        explained += 1;
    }
    assert!(explained > 30, "{explained}");
}
