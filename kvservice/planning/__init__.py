"""What another size of memory or SSD would bring: functions of measured curves, or closed forms before traffic."""
