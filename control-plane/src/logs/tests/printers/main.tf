# Shows every value in the ways of Terraform, and refuses it if told to.
variable "values" {
  type = list(string)
}
variable "refused" {
  type    = bool
  default = false
}
resource "terraform_data" "shown" {
  count = length(var.values)
  input = {
    plain         = var.values[count.index]
    line          = "a ${var.values[count.index]} b"
    lines         = <<-EOT
      a
        ${var.values[count.index]}
    EOT
    json          = jsonencode(var.values[count.index])
    document      = jsonencode({ a = var.values[count.index], (var.values[count.index]) = [jsonencode([var.values[count.index]])] })
    yaml          = yamlencode({ a = var.values[count.index], b = [var.values[count.index]] })
    query         = urlencode(var.values[count.index])
    script        = "export P=${var.values[count.index]}\ncurl -d '${jsonencode({ a = var.values[count.index] })}'\n"
    sensitive     = sensitive(var.values[count.index])
    expression    = format("%q %#v", var.values[count.index], var.values[count.index])
    documented    = jsonencode({ script = "export P=${jsonencode(var.values[count.index])}" })
    (var.values[count.index]) = "a key"
  }
  lifecycle {
    precondition {
      condition     = !var.refused || can(regex("^none$", var.values[count.index]))
      error_message = "Refused:\n${var.values[count.index]}\n${jsonencode(var.values[count.index])}."
    }
  }
}
output "shown" {
  value = var.values
}
output "encoded" {
  value = [for value in var.values : { base64 = base64encode(value), of_json = base64encode(jsonencode(value)) }]
}
output "number" {
  value = var.refused ? [for value in var.values : parseint(value, 10)] : []
}
