# What `cargo xtask conformance` runs: nothing outside the state is made, and no provider is downloaded.

terraform {
  required_version = ">= 1.4"
}

variable "word" {
  type    = string
  default = "hello"
}

variable "secret" {
  type      = string
  default   = "none"
  sensitive = true
}

variable "refuse" {
  description = "Makes the plan fail."
  type        = bool
  default     = false
}

variable "lines" {
  description = "How many lines an apply prints."
  type        = number
  default     = 0
}

variable "seconds" {
  description = "How long an apply takes."
  type        = number
  default     = 0
}

resource "terraform_data" "word" {
  input = var.word

  lifecycle {
    precondition {
      condition     = !var.refuse
      error_message = "This plan was asked to fail."
    }
  }
}

resource "terraform_data" "work" {
  input = terraform_data.word.output

  provisioner "local-exec" {
    command = "i=0; while [ $i -lt ${var.lines} ]; do i=$((i+1)); echo \"numbered line $i.\"; done; sleep ${var.seconds}"
  }
}

output "word" {
  value = terraform_data.word.output
}

output "secret" {
  value     = var.secret
  sensitive = true
}
