# Two policies, as examples: one that refuses a plan, and one that only warns.
package mayfly

import rego.v1

# Resources of these types must not be deleted or replaced.
deleted contains resource.address if {
	some resource in input.plan.resource_changes
	"delete" in resource.change.actions
	resource.type in data.protected_types
}

changed contains resource.address if {
	some resource in input.plan.resource_changes
	not resource.change.actions == ["no-op"]
	not resource.change.actions == ["read"]
}

checks contains {
	"name": "protected-resources",
	"level": level("protected-resources", "mandatory"),
	"passed": count(deleted) == 0,
	"message": concat(", ", sort(deleted)),
}

checks contains {
	"name": "few-changes",
	"level": "advisory",
	"passed": count(changed) <= data.few_changes,
	"message": sprintf("%d resources change", [count(changed)]),
}

# For workspaces that are exempt, a mandatory check is advisory.
default level(_, _) := "advisory"

level(name, wanted) := wanted if {
	not input.run.workspaceId in object.get(data.exemptions, name, [])
}
