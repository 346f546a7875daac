# A first run that needs no provider, no account and no network: `terraform_data` is built into the tool.

terraform {
  required_version = ">= 1.4"
}

variable "name" {
  description = "Whom to greet."
  type        = string
  default     = "world"
}

variable "languages" {
  description = "Greeting by language."
  type        = map(string)
  default = {
    english = "Hello"
    german  = "Hallo"
    french  = "Bonjour"
  }
}

variable "passphrase" {
  description = "Something that must not be shown."
  type        = string
  default     = "open sesame"
  sensitive   = true
}

resource "terraform_data" "greeting" {
  for_each = var.languages

  input = "${each.value}, ${var.name}!"
}

resource "terraform_data" "fingerprint" {
  triggers_replace = [for greeting in terraform_data.greeting : greeting.output]
}

output "greetings" {
  description = "What was said, by language."
  value       = { for language, greeting in terraform_data.greeting : language => greeting.output }
}

output "passphrase" {
  description = "Kept out of logs and summaries."
  value       = var.passphrase
  sensitive   = true
}
