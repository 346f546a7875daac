# Shows every value in the ways of Perl. Values come in a file, each with a zero byte behind it.
use Data::Dumper;
$Data::Dumper::Terse = 1;
open my $file, '<', $ARGV[0] or die;
my @values = split /\0/, join('', <$file>);
sub show { print "$_[0]\037$_[1]\037$_[2]\036" }
for my $at (0 .. $#values) {
    my $value = $values[$at];
    $Data::Dumper::Useqq = 0;
    show('Dumper', $at, Dumper({ a => $value }));
    $Data::Dumper::Useqq = 1;
    show('Dumper with double quotes', $at, Dumper($value));
    show('quotemeta', $at, quotemeta $value);
    (my $escaped = $value) =~ s/([^A-Za-z0-9\-\._~])/sprintf('%%%02X', ord $1)/ge;
    show('an escape', $at, $escaped);
}
