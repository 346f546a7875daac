# Refuses every value in sentences that are folded into lines, wherever in a line it stands.
variable "values" {
  type = list(string)
}
locals {
  places = 40
}
resource "terraform_data" "refused" {
  count = length(var.values) * local.places
  lifecycle {
    precondition {
      condition     = count.index < 0
      error_message = "${join("", [for word in range(count.index % local.places) : "at "])}${var.values[floor(count.index / local.places)]}, and that is not allowed."
    }
  }
}
