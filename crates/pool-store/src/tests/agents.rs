//! Tests of instances: names, conditions and limits.

use pool_protocol::id::{InstanceId, LeaseId, PoolName};
use pool_protocol::instance::{InstanceState, Phase};
use pool_protocol::lease::DeclineReason;
use pool_protocol::problem::Code;
use rstest::rstest;

use super::fixture::*;
use crate::model::{Ending, PlatformState};
use crate::view::{Condition, InstanceView, Page};

async fn listed(fixture: &Fixture) -> Vec<InstanceView> {
    let listed = fixture.store.instances(None, Page::first()).await;
    listed.unwrap()
}

#[rstest]
#[tokio::test]
async fn a_silent_instance_is_offline_after_30_s_and_removed_later(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let one = fixture.agent("one").await;
    fixture.pass(25).await;
    fixture
        .store
        .heartbeat(&pool(), CREDENTIAL, one, &beats(vec![]))
        .await
        .unwrap();
    fixture.pass(29).await;
    assert_eq!(listed(&fixture).await[0].condition, Condition::Online);
    fixture.pass(2).await;
    let view = &listed(&fixture).await[0];
    assert_eq!(view.condition, Condition::Offline);
    assert_eq!((view.capacity, view.free, view.tags.len()), (10, 9, 1));
    fixture.pass(LISTED.as_secs() - 40).await;
    assert_eq!(listed(&fixture).await.len(), 1);
    fixture.pass(15).await;
    assert!(listed(&fixture).await.is_empty());
    let beat = fixture
        .store
        .heartbeat(&pool(), CREDENTIAL, one, &beats(vec![]))
        .await;
    assert_eq!(code(beat), Code::InstanceUnknown);
}

#[rstest]
#[tokio::test]
async fn a_name_belongs_to_one_installation_until_it_is_offline(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let one = fixture.agent("one").await;
    let mut other = registration("one");
    other.system_id = "x".to_owned();
    other.installation = "cluster b".to_owned();
    let refused = fixture
        .store
        .register(&pool(), CREDENTIAL, &other)
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::InstanceNameTaken);
    // An agent does not learn of another installation.
    assert!(!refused.to_string().contains("cluster of one"), "{refused}");
    // Another pool has its own names.
    let us: PoolName = "us".parse().unwrap();
    fixture
        .store
        .register(&us, CREDENTIAL, &other)
        .await
        .unwrap();
    // The same installation can register again, or a second instance.
    assert_eq!(fixture.agent("one").await, one);
    let mut replica = registration("one");
    replica.system_id = "one-2".to_owned();
    fixture
        .store
        .register(&pool(), CREDENTIAL, &replica)
        .await
        .unwrap();
    fixture.pass(31).await;
    fixture
        .store
        .register(&pool(), CREDENTIAL, &other)
        .await
        .unwrap();
    let back = fixture
        .store
        .register(&pool(), CREDENTIAL, &registration("one"))
        .await;
    assert_eq!(code(back), Code::InstanceNameTaken);
}

#[rstest]
#[tokio::test]
async fn an_instance_whose_leases_fail_is_degraded(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let task = fixture.ready("acme", "1").await;
    let one = fixture.agent("one").await;
    for _ in 0..3 {
        assert_eq!(listed(&fixture).await[0].condition, Condition::Online);
        let leased = fixture.lease(one).await.unwrap();
        let decline = declined(DeclineReason::Failed, "the API server is away");
        fixture.store.decline(leased.grant, &decline).await.unwrap();
        fixture
            .store
            .apply_platform_state(task, PlatformState::Waiting)
            .await
            .unwrap();
        for _ in 0..3 {
            fixture.pass(15).await;
            let beat = beats(vec![]);
            fixture
                .store
                .heartbeat(&pool(), CREDENTIAL, one, &beat)
                .await
                .unwrap();
        }
    }
    let view = &listed(&fixture).await[0];
    assert_eq!((view.condition, view.failures), (Condition::Degraded, 3));
    let leased = fixture.lease(one).await.unwrap();
    fixture.store.started(leased.grant, "ns/job").await.unwrap();
    assert_eq!(listed(&fixture).await[0].condition, Condition::Online);
}

#[rstest]
#[tokio::test]
async fn leases_without_an_executor_count_as_failed_after_120_s(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let one = fixture.agent("one").await;
    let mut holding = Vec::new();
    for job in ["1", "2", "3"] {
        fixture.ready("acme", job).await;
        let known: Vec<LeaseId> = holding
            .iter()
            .map(|held: &crate::LeasedTask| held.grant.lease)
            .collect();
        holding.push(fixture.lease_beside(one, &known).await.unwrap());
    }
    for second in (0..130).step_by(10) {
        let expected = if second < 120 {
            Condition::Online
        } else {
            Condition::Degraded
        };
        assert_eq!(listed(&fixture).await[0].condition, expected, "{second}");
        let held = holding.iter().map(|leased| held(leased, Phase::Preparing));
        let named = beats(held.collect());
        fixture
            .store
            .heartbeat(&pool(), CREDENTIAL, one, &named)
            .await
            .unwrap();
        fixture.pass(10).await;
    }
    assert_eq!(listed(&fixture).await[0].condition, Condition::Degraded);
}

#[rstest]
#[tokio::test]
async fn a_new_process_takes_over_the_leases_it_finds(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let leased = fixture.running("1").await;
    let mut next = registration("one");
    next.system_id = "one-2".to_owned();
    let unknown = pool_protocol::instance::InstanceLease {
        lease_id: LeaseId::new(),
        ..held(&leased, Phase::Started)
    };
    next.leases = vec![held(&leased, Phase::Running), unknown.clone()];
    let registered = fixture
        .store
        .register(&pool(), CREDENTIAL, &next)
        .await
        .unwrap();
    assert_eq!(registered.stale, [unknown.lease_id]);
    let view = fixture.view(leased.grant.task).await;
    assert_eq!(view.instance, Some(registered.instance));
    // Another agent cannot name them.
    let mut other = registration("two");
    other.leases = vec![held(&leased, Phase::Started)];
    let registered = fixture
        .store
        .register(&pool(), CREDENTIAL, &other)
        .await
        .unwrap();
    assert_eq!(registered.stale, [leased.grant.lease]);
    // The agent follows the executor, so the task is not orphaned.
    let one = fixture.agent("one").await;
    for _ in 0..10 {
        let named = beats(vec![held(&leased, Phase::Running)]);
        fixture
            .store
            .heartbeat(&pool(), CREDENTIAL, one, &named)
            .await
            .unwrap();
        assert!(fixture.pass(60).await.is_empty());
    }
}

#[rstest]
#[tokio::test]
async fn an_instance_gets_tasks_of_its_own_pool_only(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    fixture.ready("acme", "1").await;
    let us: PoolName = "us".parse().unwrap();
    let foreign = fixture
        .store
        .register(&us, CREDENTIAL, &registration("one"))
        .await;
    let foreign = foreign.unwrap().instance;
    let request = request(foreign, &[]);
    assert_eq!(
        code(fixture.store.lease(&request).await),
        Code::InstancePoolMismatch
    );
    let mut there = request.clone();
    there.pool = us;
    assert!(fixture.store.lease(&there).await.unwrap().is_none());
    let beat = beats(vec![]);
    let heartbeat = fixture
        .store
        .heartbeat(&pool(), CREDENTIAL, foreign, &beat)
        .await;
    assert_eq!(code(heartbeat), Code::InstancePoolMismatch);
    let removed = fixture.store.remove(&pool(), foreign).await;
    assert_eq!(code(removed), Code::InstancePoolMismatch);
    there.instance = InstanceId::new();
    assert_eq!(
        code(fixture.store.lease(&there).await),
        Code::InstanceUnknown
    );
    fixture
        .store
        .remove(&pool(), InstanceId::new())
        .await
        .unwrap();
}

#[rstest]
#[tokio::test]
async fn lists_and_texts_of_agents_have_limits(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let one = fixture.agent("one").await;
    let leased = fixture.running("1").await;
    let many = vec![held(&leased, Phase::Started); 1001];
    let heartbeat = fixture
        .store
        .heartbeat(&pool(), CREDENTIAL, one, &beats(many.clone()))
        .await;
    assert_eq!(code(heartbeat), Code::RequestInvalid);
    let holding = vec![leased.grant.lease; 1001];
    let lease = fixture.store.lease(&request(one, &holding)).await;
    assert_eq!(code(lease), Code::RequestInvalid);
    let mut tags = registration("two");
    tags.tags = vec![String::new(); 33];
    let mut leases = registration("two");
    leases.leases = many;
    let mut version = registration("two");
    version.executor_version = "1".repeat(257);
    for registration in [tags, leases, version] {
        let refused = fixture
            .store
            .register(&pool(), CREDENTIAL, &registration)
            .await;
        assert_eq!(code(refused), Code::RequestInvalid);
    }
    let long = fixture.store.started(leased.grant, &"j".repeat(5000)).await;
    long.unwrap();
    let executor = fixture.view(leased.grant.task).await.executor.unwrap();
    assert_eq!(executor.len(), 1000);
    let long = fixture
        .store
        .accept(leased.grant, &holder(&"u".repeat(257)))
        .await;
    assert_eq!(code(long), Code::RequestInvalid);
    let long = fixture
        .store
        .lease_heartbeat(leased.grant, &beat(&"u".repeat(257)))
        .await;
    assert_eq!(code(long), Code::RequestInvalid);
    // PostgreSQL cannot store NUL.
    let nul = end_report(true);
    let nul = pool_protocol::lease::End {
        diagnostic: format!("a\0{}", "d".repeat(10_000)),
        verdict: Some("\0".to_owned()),
        ..nul
    };
    let ended = fixture.store.end(leased.grant, Ending::Failed, &nul).await;
    ended.unwrap();
    let end = fixture.view(leased.grant.task).await.end.unwrap();
    assert!(end.diagnostic.starts_with("ad") && end.diagnostic.len() <= 8000);
}

#[rstest]
#[tokio::test]
async fn a_draining_instance_is_listed_as_draining(
    #[values(Engine::Sqlite, Engine::Postgres)] engine: Engine,
) {
    let Some(fixture) = Fixture::open(engine).await else {
        return;
    };
    let one = fixture.agent("one").await;
    let mut beat = beats(vec![]);
    beat.state = InstanceState::Draining;
    fixture
        .store
        .heartbeat(&pool(), CREDENTIAL, one, &beat)
        .await
        .unwrap();
    assert_eq!(listed(&fixture).await[0].condition, Condition::Draining);
    assert_eq!(fixture.store.pools().await.unwrap()[0].free, 0);
}
