//! Reads the types of a job's steps from its template. The platform's records of steps have only a number; the template has
//! number and type.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::GeneralPurpose;
use job_contract::StepType;
use job_contract::secret::AS_JAVA;
use job_contract::status::StepStatus;
use serde::Deserialize;

use super::document::KnownStep;

/// Whether this build reads templates.
pub(super) const IS_BUILT: bool = true;

/// Decodes templates as the platform does.
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, AS_JAVA);

#[derive(Debug, Deserialize)]
struct Template {
    #[serde(default)]
    flow: Vec<FlowEntry>,
}

#[derive(Debug, Deserialize)]
struct FlowEntry {
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default)]
    step: i64,
}

/// Whether a plan step of the job is completed. `false` if the template cannot be read.
pub(super) fn was_planned(tcl: &str, steps: impl Iterator<Item = KnownStep>) -> bool {
    let Some(template) = read(tcl) else {
        return false;
    };
    let is_plan = |number| {
        template.flow.iter().any(|entry| {
            Some(entry.step) == number
                && matches!(
                    StepType::parse(&entry.kind),
                    Some(StepType::Plan | StepType::PlanDestroy)
                )
        })
    };
    steps
        .filter(|step| step.status == Some(StepStatus::Completed))
        .any(|step| is_plan(step.number))
}

fn read(tcl: &str) -> Option<Template> {
    let text = STANDARD.decode(tcl.trim()).ok()?;
    serde_saphyr::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const TEMPLATE: &str = "\
flow:
  - type: \"terraformPlan\"
    name: \"Plan\"
    step: 100
    commands:
      - runtime: BASH
        priority: 100
        before: true
        script: |
          echo type
  - type: approval
    step: 150
    team: TERRAKUBE_ADMIN
  - type: terraformApply
    step: 200
";

    fn step(number: i64, status: StepStatus) -> KnownStep {
        KnownStep {
            id: number.to_string(),
            status: Some(status),
            number: Some(number),
            output: None,
        }
    }

    #[rstest]
    #[case(100, StepStatus::Completed, true)]
    #[case(100, StepStatus::Running, false)]
    #[case(150, StepStatus::Completed, false)]
    fn a_job_is_planned_once_its_plan_step_is_completed(
        #[case] number: i64,
        #[case] status: StepStatus,
        #[case] planned: bool,
    ) {
        let tcl = STANDARD.encode(TEMPLATE);
        assert_eq!(
            was_planned(&tcl, [step(number, status)].into_iter()),
            planned
        );
    }

    #[rstest]
    #[case("no base64")]
    #[case("Zmxvdzo=")]
    #[case("eyBbIDo=")]
    fn an_unreadable_template_shows_no_plan(#[case] tcl: &str) {
        let steps = [step(100, StepStatus::Completed)].into_iter();
        assert!(!was_planned(tcl, steps));
    }
}
